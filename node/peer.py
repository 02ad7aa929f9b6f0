"""`Peer`: a training loop's membership in a swarm.

Whatever trains, calls `step` after each inner step; it applies what the swarm has merged and publishes
when the pace says so. It never waits for the network: what it spends is encoding and adding, and it keeps
count of that.
"""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from gossamer.models.task import named_tensors
from gossamer.node import control
from gossamer.node.checkpoint import CheckpointWriter, Progress, collect, restore
from gossamer.node.daemon_link import DaemonLink, Offer
from gossamer.node.home import Home
from gossamer.node.outer import OuterLoop
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.pace import Pace

CONNECT_TIMEOUT_S = 60.0
POLL_S = 0.01


class Peer:
    """One model's place in the swarm. Not thread-safe: it belongs to the training thread."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        manifest: Manifest,
        link: DaemonLink,
        *,
        checkpoint: Path,
        stop_round: int = 0,
    ) -> None:
        """Raises ConfigError if the model does not fit the manifest."""
        self._optimizer = optimizer
        self._checkpoint_path = checkpoint
        self._checkpoint = CheckpointWriter(checkpoint)
        self.progress = Progress()
        """How far this node has come over all its runs."""
        self.resumed = False
        """Whether the inner optimizer goes on from an earlier run."""
        self._outer = OuterLoop(dict(named_tensors(model)), manifest)
        self._link = link
        self._codec = manifest.outer.codec
        self._pace = Pace(manifest.pace, manifest.layout.fragments)
        self._stop_round = stop_round
        self._steps_since = 0
        self._published_at = time.monotonic()
        self._started = time.perf_counter()
        self._outer_s = 0.0
        self.version = 0
        """The newest merge that the model has seen."""
        self.last_loss = 0.0

    @classmethod
    def connect(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        folder: Path,
        manifest: Manifest,
        *,
        stop_round: int = 0,
    ) -> "Peer":
        """Join the daemon that runs in `folder`. Raises UnreachableError or ConfigError."""
        home = Home(folder)
        link = DaemonLink(home.socket_path(), manifest)
        try:
            link.wait_connected(CONNECT_TIMEOUT_S)
            return cls(
                model, optimizer, manifest, link, checkpoint=home.checkpoint_path, stop_round=stop_round
            )
        except BaseException:
            link.close()
            raise

    # -- what the loop asks

    @property
    def node_id(self) -> bytes:
        return self._link.node_id

    @property
    def round(self) -> int:
        """Our last published round."""
        return self._link.own_last

    @property
    def clock(self) -> int:
        """The swarm's round clock."""
        return self._link.clock

    @property
    def swarm_tokens(self) -> int:
        """Tokens of all deltas merged so far: what schedules are functions of."""
        return self._link.swarm_tokens

    @property
    def should_stop(self) -> bool:
        """Whether the node is stopping."""
        return self._link.stop_asked.is_set()

    @property
    def finished(self) -> bool:
        """Whether the last round that was asked for is published."""
        return 0 < self._stop_round <= self.round

    @property
    def wait_fraction(self) -> float:
        """Part of the wall time since `begin` that the loop was kept from inner steps: all of `step`.

        An upper bound on waiting: encoding, adding and every lock are in it.
        """
        return self._outer_s / max(1e-9, time.perf_counter() - self._started)

    # -- what the loop does

    def begin(self, on_wait: Callable[[], None] | None = None) -> bool:
        """Wait for the swarm's model and load it. Returns False if the node is stopping instead.

        The one place that waits: nobody should train from fresh weights because a peer was slow.
        """
        missing = set(range(len(self._outer.fragments)))
        while missing and not self.should_stop:
            offer = self._link.take_offer()
            if offer is None:
                time.sleep(POLL_S)
                if on_wait is not None:
                    on_wait()
                continue
            self._load(offer)
            missing.discard(offer.fragment)
        progress = restore(self._checkpoint_path, self._outer, self._optimizer)
        self.resumed = progress is not None
        self.progress = progress or self.progress
        self._started = time.perf_counter()
        self._published_at = time.monotonic()
        return not missing

    def step(self, tokens: int, loss: float | Tensor) -> int | None:
        """Note an inner step; apply and publish what is due. Returns the round published, if any.

        Raises DivergedError.
        """
        begun = time.perf_counter()
        self._outer.step(tokens, loss)
        self.progress = Progress(self.progress.steps + 1, self.progress.tokens + tokens)
        self._steps_since += 1
        self._apply_offers()
        round_ = self._due()
        if round_ is not None:
            self._publish(round_)
            if self._checkpoint.is_due():
                self._checkpoint.write(*collect(self._outer, self._optimizer, self.progress))
        self._outer_s += time.perf_counter() - begun
        return round_

    def flush(self, timeout_s: float) -> None:
        """Before leaving: publish what the open window holds, and see that all of it is on disk."""
        round_ = max(self._link.own_last + 1, self._link.clock)
        may = self._steps_since > 0 and round_ <= self._link.clock + 1 and not self.finished
        if may and self._link.can_publish:
            self._publish(round_)
        self._checkpoint.write(*collect(self._outer, self._optimizer, self.progress), wait=True)
        self._link.wait_acknowledged(timeout_s)

    def drop_progress(self) -> None:
        """After the last round: go back to Phi, leaving out what the open windows hold."""
        self._outer.reset()

    def settle(self) -> bool:
        """After `drop_progress`: take over Phi as it changes. Returns whether it did."""
        changed = False
        while (offer := self._link.take_offer()) is not None:
            self._load(offer)
            changed = True
        return changed

    def report(self, report: control.Report) -> None:
        """Tell the daemon how training is doing."""
        self._link.send(report)

    def close(self) -> None:
        """Disconnect from the daemon."""
        self._link.close()

    # -- inside

    def _due(self) -> int | None:
        if not self._link.can_publish:
            return None
        seconds = time.monotonic() - self._published_at
        round_ = self._pace.due(self._link.own_last, self._link.clock, self._steps_since, seconds)
        return None if round_ is not None and 0 < self._stop_round < round_ else round_

    def _publish(self, round_: int) -> None:
        index = round_ % len(self._outer.fragments)
        area = self._link.payload_area
        length, window = self._outer.publish(index, round_, area)
        self.last_loss = window.mean_loss
        self._link.publish(
            control.Publish(
                round=round_,
                base=window.base,
                tokens=window.tokens,
                steps=window.steps,
                loss=window.mean_loss,
                codec=self._codec,
                payload_bytes=length,
            ),
            area,
        )
        self._steps_since = 0
        self._published_at = time.monotonic()

    def _apply_offers(self) -> None:
        while (offer := self._link.take_offer()) is not None:
            state = self._outer.fragments[offer.fragment]
            # An image from before our own last delta was merged would take that delta back for a moment.
            if offer.own_round >= state.last_published:
                self._outer.apply(offer.fragment, offer.values(state.fragment), offer.merged_round)
                self.version = max(self.version, offer.version)
            self._link.took(offer)

    def _load(self, offer: Offer) -> None:
        state = self._outer.fragments[offer.fragment]
        state.last_published = max(state.last_published, offer.own_round)
        phi = offer.values(state.fragment)
        self._outer.apply(offer.fragment, phi, offer.merged_round, keep_progress=False)
        self.version = max(self.version, offer.version)
        self._link.took(offer)
