"""`Peer`: a training loop's membership in the swarm.

Whatever trains, calls `step` after each inner step; it applies what the swarm has merged and publishes
when the pace says so. It never waits for the network: what it spends is encoding and adding, and it keeps
count of that.
"""

import os
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from math import isfinite
from pathlib import Path
from threading import Lock
from typing import SupportsFloat, SupportsInt

import torch
from torch import Tensor, nn

from gossamer.models.task import named_tensors
from gossamer.node.ipc import control
from gossamer.node.ipc.daemon_link import DaemonLink, Offer
from gossamer.node.storage.home import Home
from gossamer.node.training.beside import Beside
from gossamer.node.training.checkpoint import Progress, restore
from gossamer.node.training.checkpointwriter import CheckpointWriter
from gossamer.node.training.outer import OuterLoop
from gossamer.node.training.parameters import Binding
from gossamer.node.training.ranks import DONE, GAVE_UP, Alone, Ranks, Word
from gossamer.node.training.standing import LEAVE_S, Standing
from gossamer.node.training.steps import mean_loss, token_count
from gossamer.protocol.limits import LOSS_MAX, TOKENS_MAX
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.pace import Pace

CONNECT_TIMEOUT_S = 60.0
POLL_S = 0.01


class Peer(Standing):
    """One model's place in the swarm. Not thread-safe: it belongs to the training thread.

    A script makes one with `attach`; the built-in trainer, whose daemon somebody else runs, with `connect`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        manifest: Manifest,
        link: DaemonLink,
        *,
        checkpoint: Path,
        stop_round: int = 0,
        team: Alone | Ranks | None = None,
        beside: Beside | None = None,
    ) -> None:
        """Raises ConfigError if the model does not fit the manifest."""
        team = team or Alone(dict(named_tensors(model, frozen=True)))
        super().__init__(model, link, team, stop_round=stop_round, beside=beside)
        self._link: DaemonLink = link
        self._optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
        self._checkpoint_path = checkpoint
        self._checkpoint = CheckpointWriter(checkpoint)
        self._stepping = Lock()
        self._outer = OuterLoop(self._team.bind(manifest.plan()), manifest)
        self._binding = Binding(model, manifest)
        self._codec = manifest.outer.codec
        self._pace = Pace(manifest.pace, manifest.layout.fragments)
        self._steps_since = 0
        self._published_at = time.monotonic()
        self._pending: list[Offer] = []
        """Taken, and not applied yet."""
        self._share_waits = False

    @classmethod
    def connect(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
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

    @staticmethod
    def attach(
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        manifest: Manifest | str | os.PathLike[str] | None = None,
        join: Collection[str] = (),
        invite: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        name: str = "",
        listen: str = "0.0.0.0:0",
        advertise: Sequence[str] = (),
        swarm_id: str | None = None,
        trust: Collection[str] = (),
        stop_round: int = 0,
        plaintext: bool = False,
        debug: bool = False,
    ) -> "Peer":
        """Make this script a node: start a daemon beside it, wait for the swarm's model, and load it.

        Use it in a `with`, and call `step` after each step of the optimizer. Where torch.distributed is
        initialised, all its ranks are one node: every rank calls `attach`, `step` and leaves the `with`.

        Args:
            model: on its device already. The parameters that the manifest lists become the swarm's; others,
                which have to be frozen, and buffers (a batch norm's statistics) stay this node's own. May be
                compiled, wrapped in DistributedDataParallel, or sharded by FSDP2.
            optimizer: any inner optimizer, or several that share the parameters between them.
            manifest: the swarm, as a TOML file or read already; None takes it from `join` or `folder`.
            join: nodes of the swarm, ``HOST:PORT`` or ``gossamer://NODE_ID@HOST:PORT``. Without any, the node
                in `folder` goes on; a new one founds the swarm, for which `model` must hold the swarm's first
                parameters.
            invite: what ``gossamer invite`` printed for this node, or its file.
            folder: the node's folder; the default is that of ``gossamer node``, ~/.gossamer/SWARM. Two nodes
                on one machine need two.
            name: what displays call this node.
            listen: where others reach it; port 0 chooses one.
            advertise: addresses to tell others, where they are not as it listens.
            swarm_id: refuse any other swarm than this (its id or the beginning of it).
            trust: ids of nodes whose word is enough for which model to start from, where members disagree.
            stop_round: publish no round past this one; 0 for never. See `finished`.
            plaintext: no TLS. For tests on loopback; all nodes must do the same.
            debug: have the daemon log more.

        Raises:
            ConfigError: model, manifest, folder or addresses do not fit; the message says which, and how.
            UnreachableError: nobody answers at `join`.
            StorageError: the folder cannot be used.
            SystemExit: the node was told to stop before it had the model.
        """
        from gossamer.node.training.attaching import attach

        return attach(
            model,
            optimizer,
            manifest=manifest,
            join=join,
            invite=invite,
            folder=folder,
            name=name,
            listen=listen,
            advertise=advertise,
            swarm_id=swarm_id,
            trust=trust,
            stop_round=stop_round,
            plaintext=plaintext,
            debug=debug,
        )

    # -- what the loop does

    def begin(self, on_wait: Callable[[], None] | None = None) -> bool:
        """Wait for the swarm's model and load it. Returns False if the node is stopping instead.

        The one place that waits: nobody should train from fresh weights because a peer was slow.
        """
        missing = set(range(len(self._outer.fragments)))
        while missing and not self.should_stop:
            offer = self._link.take_offer()
            with self._changing([offer] if offer else []):
                if offer is not None:
                    self._load(offer)
                    missing.discard(offer.fragment)
            if offer is None:
                time.sleep(POLL_S)
                if on_wait is not None:
                    on_wait()
        restored = restore(self._checkpoint_path, self._outer, self._saved_optimizers)
        if restored is not None:
            self.progress, self.resumed = restored
        word = self._agree(done=DONE)
        self._started = time.perf_counter()
        self._published_at = time.monotonic()
        return not missing and not (word.stop and self._team.size > 1)

    def step(self, tokens: SupportsInt, loss: SupportsFloat | Tensor) -> int | None:
        """Note an inner step; apply and publish what is due. Returns the round published, if any.

        Call it once per step of the optimizer, not per micro-batch, and never between a backward pass and
        that step. Of several ranks all call it.

        Args:
            tokens: tokens (or samples, always the same unit) that this step trained on, on this rank; a
                whole number, at least 1. Deltas are weighed by them.
            loss: their mean loss, for displays; a tensor of one element stays on its device until the window
                closes.

        Raises:
            ValueError: no tokens, or a loss that is no number; nothing has been noted then.
            RuntimeError: the peer has left, another thread is in here, or this is a forked process.
            DivergedError: a parameter is not finite, or moved too far.
            ConfigError: the model's parameters are not those that it attached with.
            SystemExit: the loop went on although `should_stop` (attached peers only).
        """
        self._check_here()
        count, mean = token_count(tokens), mean_loss(loss)
        if not self._stepping.acquire(blocking=False):
            raise RuntimeError("two threads call step at once: a peer belongs to one training loop")
        try:
            return self._step(count, mean)
        finally:
            self._stepping.release()

    def _step(self, tokens: int, loss: float | Tensor) -> int | None:
        begun = time.perf_counter()
        self._inside = True
        self._steps_since += 1
        self._steps_run += 1
        before = self.version
        round_ = self._due()
        offers = self._newer(self._offers_for_now(round_))
        if self._team.size == 1 and not offers and round_ is None:
            self._note(tokens, loss)  # most steps: nobody to agree with, and nothing to do
        else:
            with self._changing(offers, round_, tokens):
                self._note(self._word.tokens, loss)
                for offer in offers:
                    self._apply(offer)
                if round_ is not None:
                    self._publish(round_)
        self._checkpoint_if_due(round_)
        self._inside = False
        self._outer_s += time.perf_counter() - begun
        self._after_step(before)
        return round_

    def flush(self, timeout_s: float) -> None:
        """Before leaving: publish what the open window holds, and see that all of it is on disk."""
        round_ = max(self._link.own_last + 1, self._link.clock)
        may = self._steps_since > 0 and round_ <= self._link.clock + 1 and not self.finished
        due = round_ if may and self._link.can_publish else None
        with self._changing([], due):
            if due is not None:
                self._publish(due)
        self._checkpoint.save(self._outer, self._saved_optimizers, self.progress)
        self._link.wait_acknowledged(timeout_s)

    def drop_progress(self) -> None:
        """After the last round: go back to Phi, leaving out what the open windows hold."""
        everything = frozenset(range(len(self._outer.fragments)))
        self._agree(everything)
        with self._team.full(everything):
            self._outer.reset()
        self._steps_since = 0

    def settle(self) -> bool:
        """After `drop_progress`: take over Phi as it changes. Returns whether it did."""
        offers = self._take_offers()
        with self._changing(offers):
            for offer in offers:
                self._load(offer)
        return bool(offers)

    def finish(self, *, quiet_s: float = 2.0, timeout_s: float = 30.0) -> bool:
        """Stop training and hold the swarm's own model, with nothing in it that is this node's alone.

        Publishes the open window, as leaving does, and follows Phi until nothing has changed it for
        `quiet_s`, or `timeout_s` have passed; returns whether it came to rest. Nodes that have merged the
        same deltas then hold the same parameters, bit for bit.
        """
        self._check_here()
        self.flush(LEAVE_S)
        self.drop_progress()
        begun = changed = time.monotonic()
        while True:
            if self.settle():
                changed = time.monotonic()
            self._tell("finished")
            now = time.monotonic()
            rests, gives_up = now - changed >= quiet_s, now - begun >= timeout_s or self.should_stop
            if self._agree(done=DONE if rests else GAVE_UP if gives_up else 0).done:
                return rests
            time.sleep(POLL_S)

    def report(self, report: control.Report) -> None:
        """Tell the daemon how training is doing."""
        self._link.send(report)

    def close(self) -> None:
        self._checkpoint.close()
        super().close()

    # -- inside

    def _agree(
        self,
        touched: frozenset[int] = frozenset(),
        *,
        tokens: int = 0,
        done: int = 0,
        round_: int = 0,
        version: int = 0,
    ) -> Word:
        self._word = self._team.agree(
            Word(
                tokens=tokens,
                stop=int(self._is_told_to_stop()),
                done=done,
                own_last=max(self._link.own_last, round_),
                clock=self._link.clock,
                swarm_tokens=self._link.swarm_tokens,
                links=self._link.links,
                version=max(self.version, version),
                steps=self.progress.steps,
                own_tokens=self.progress.tokens,
                loss=self.last_loss,
                touched=touched,
            )
        )
        return self._word

    def _changing(
        self, offers: Sequence[Offer] = (), round_: int | None = None, tokens: int = 0
    ) -> AbstractContextManager[object]:
        """Agree with the other ranks on what changes now; inside, those fragments are here in full."""
        if offers or round_ is not None:
            self._binding.check()
        touched = {offer.fragment for offer in offers}
        if round_ is not None:
            touched.add(round_ % len(self._outer.fragments))
        version = max((offer.version for offer in offers), default=0)
        self._agree(frozenset(touched), tokens=tokens, round_=round_ or 0, version=version)
        return self._team.full(frozenset(touched))

    def _note(self, tokens: int, loss: float | Tensor) -> None:
        self._outer.step(tokens, loss)
        self.progress = Progress(self.progress.steps + 1, self.progress.tokens + tokens)

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
        # A loss is for displays: one that overflowed (float16 before its scaler has settled) costs no delta.
        loss = window.mean_loss
        if isfinite(loss):
            self.last_loss = max(-LOSS_MAX, min(LOSS_MAX, loss))
        self._link.publish(
            control.Publish(
                round=round_,
                base=window.base,
                tokens=min(window.tokens, TOKENS_MAX),
                steps=window.steps,
                loss=self.last_loss,
                codec=self._codec,
                payload_bytes=length,
            ),
            area,
        )
        self._steps_since = 0
        self._published_at = time.monotonic()

    def _checkpoint_if_due(self, round_: int | None) -> None:
        """Begin a checkpoint if one is due; copy a share of one that was begun.

        Rather at the next step than at one that publishes.
        """
        if round_ is not None and not self._share_waits:
            self._share_waits = True
            return
        self._share_waits = False
        if self._checkpoint.is_due():
            self._checkpoint.begin(self._outer, self._saved_optimizers)
        self._checkpoint.advance(self.progress)

    @property
    def _saved_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        return self._optimizers if self._team.size == 1 else ()

    def _take_offers(self) -> list[Offer]:
        offers, self._pending = self._pending + self._link_offers(), []
        return offers

    def _link_offers(self) -> list[Offer]:
        offers = []
        while (offer := self._link.take_offer()) is not None:
            offers.append(offer)
        return offers

    def _offers_for_now(self, round_: int | None) -> list[Offer]:
        """Those to apply at this step, so that no step is held up by all there is to do.

        One that comes as another fragment is published waits a step. Of several, half wait.
        """
        waited = len(self._pending)
        self._pending += self._link_offers()
        if not self._pending:
            return []
        if round_ is None:
            count = -(-len(self._pending) // 2)
        else:
            fragment = round_ % len(self._outer.fragments)
            last = max((i for i, offer in enumerate(self._pending) if offer.fragment == fragment), default=-1)
            count = max(waited, last + 1)
        now, self._pending = self._pending[:count], self._pending[count:]
        return now

    def _newer(self, offers: Sequence[Offer]) -> list[Offer]:
        """Those that hold our own last delta: an image from before would take it back for a moment."""
        newer = []
        for offer in offers:
            if offer.own_round >= self._outer.fragments[offer.fragment].last_published:
                newer.append(offer)
            else:
                self._link.took(offer)
        return newer

    def _apply(self, offer: Offer) -> None:
        fragment = self._outer.fragments[offer.fragment].fragment
        self._outer.apply(offer.fragment, offer.values(fragment), offer.merged_round)
        self.version = max(self.version, offer.version)
        self._link.took(offer)

    def _load(self, offer: Offer) -> None:
        state = self._outer.fragments[offer.fragment]
        state.last_published = max(state.last_published, offer.own_round)
        phi = offer.values(state.fragment)
        self._outer.apply(offer.fragment, phi, offer.merged_round, keep_progress=False)
        self.version = max(self.version, offer.version)
        self._link.took(offer)
