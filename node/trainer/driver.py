"""The role of the first rank, or of the only one: it forms the deltas, and talks to the daemon.

It never waits for the network. It spends its time on encoding and adding, and measures it.
"""

import abc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import isfinite
from pathlib import Path
from threading import Event
from typing import Protocol

import torch
from torch import Tensor, nn

from gossamer.node.ipc import messages as control
from gossamer.node.ipc.messages import Report
from gossamer.node.trainer.beside import Beside
from gossamer.node.trainer.checkpoint import CheckpointWriter, restore
from gossamer.node.trainer.daemon_link import OUTDATED, DaemonLink, Offer
from gossamer.node.trainer.metrics import Progress
from gossamer.node.trainer.outer import OuterLoop
from gossamer.node.trainer.parameters import Binding
from gossamer.node.trainer.phi_updates import Incoming, Staging
from gossamer.node.trainer.ranks import DONE, Team, Word
from gossamer.node.trainer.watchdogs import IdleWatch, StepWatch, held_back
from gossamer.protocol.errors import ConfigError, DivergedError
from gossamer.protocol.limits import LOSS_MAX, OWN_TOKENS_MAX, STEPS_MAX, TOKENS_MAX
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.pace import Pace

# --- What one process does for its node: the first rank leads, and the others follow.
#
# A `Peer` plays one of the two. With several ranks, all see the swarm as the first saw it at the last step,
# so
# that all decide alike.


class SwarmView(Protocol):
    """What a rank knows of the daemon and the swarm."""

    node_id: bytes
    own_last: int
    clock: int
    swarm_tokens: int
    links: int
    stop_asked: Event
    is_outdated: bool

    def close(self) -> None: ...


class RankRole(abc.ABC):
    """Leading or following. Every method is called on all ranks alike."""

    def __init__(self, link: SwarmView, team: Team, *, stop_round: int, beside: Beside | None = None) -> None:
        """`beside` is None for the built-in trainer, which has no daemon of its own and no SIGTERM to
        catch."""
        self._link: SwarmView = link
        self._stop_round = stop_round
        self._word = Word()
        self.team = team
        self.beside = beside
        self.progress = Progress()
        self.resumed = False
        self.version = 0
        self.taken = 0
        """Steps that have taken over a newer Phi. Unlike the version, it does not restart with the daemon."""
        self.last_loss = 0.0
        self.begun_at = time.perf_counter()
        self.outer_s = 0.0
        """Seconds since `begun_at` in which `step` has kept the loop from inner steps."""
        self.is_stepping = False
        """Whether a change is half done, now or since an error, so that nothing can be published. With
        several ranks, the first knows."""
        self.stop_requested = False
        """Whether the script wants its loop to end; with several ranks, all hear of it at the next step."""

    @property
    def node_id(self) -> bytes:
        return self._link.node_id

    @property
    def seen(self) -> SwarmView | Word:
        """What the swarm looks like; with several ranks, as the first told all of them at the last step."""
        return self._link if self.team.size == 1 else self._word

    @property
    def should_stop(self) -> bool:
        word = self._word
        return bool(word.stop or word.leaving) if self.team.size > 1 else self._is_told_to_stop()

    def ending(self) -> BaseException:
        """The exception for a loop that goes on although it should stop."""
        assert self.beside is not None
        if self._link.is_outdated:
            return ConfigError(f"{OUTDATED}: start this script again, which goes on from its folder")
        if self._word.leaving:
            return ConfigError(
                "another rank of this node has left its training loop, and all have to leave theirs at the"
                " same step: call request_stop, and break when should_stop says so"
            )
        return self.beside.ending()

    @property
    def is_outdated(self) -> bool:
        """Whether the daemon is of another release than this process."""
        return self._link.is_outdated

    @property
    def was_terminated(self) -> bool:
        """Whether SIGTERM has come to the script."""
        return self.beside is not None and self.beside.was_terminated

    def _is_told_to_stop(self) -> bool:
        told = self._link.stop_asked.is_set() or (self.beside is not None and self.beside.must_stop)
        return told or self.stop_requested

    @property
    def finished(self) -> bool:
        next_round = max(self.seen.own_last + 1, self.seen.clock)  # the swarm may have skipped the last round
        return 0 < self._stop_round < next_round

    @abc.abstractmethod
    def begin(self, on_wait: Callable[[], None] | None = None) -> bool:
        """Wait for the swarm's model and load it. Returns False if the node is stopping instead."""

    @abc.abstractmethod
    def step(self, tokens: int, loss: float | Tensor) -> int | None:
        """Record an inner step; apply and publish what is due. Returns the round published, if any."""

    @abc.abstractmethod
    def await_daemon(self, timeout_s: float) -> None:
        """Wait for a daemon that has ended and is being started again, if the open window holds anything."""

    @abc.abstractmethod
    def flush(self, timeout_s: float) -> None:
        """Publish what the open window holds, save a checkpoint, and wait until the delta is on disk."""

    @abc.abstractmethod
    def save_if_whole(self) -> None:
        """After an error: save what it left whole, if that can be told. The last checkpoint is better than a
        state that may be torn. Raises nothing, so that the error itself is seen."""

    @abc.abstractmethod
    def drop_progress(self) -> None:
        """Go back to Phi, and discard what the open windows hold."""

    @abc.abstractmethod
    def settle(self) -> bool:
        """After `drop_progress`: take over Phi as it changes. Returns whether it did; on the first rank,
        which alone knows what is to come, also whether it may be about to."""

    @abc.abstractmethod
    def agree_done(self, done: int) -> int:
        """Say whether what all ranks do together is over. Returns what the first rank says."""

    @abc.abstractmethod
    def report(self, report: Report) -> None:
        """Tell the daemon how training is doing."""

    def close(self) -> None:
        """Disconnect from the daemon; an attached script's daemon stops, even if Ctrl-C cuts this short."""
        try:
            self.team.close()
            self._link.close()
        finally:
            if self.beside is not None:
                self.beside.stop()


POLL_S = 0.01

log = logging.getLogger("gossamer.peer")


class Leader(RankRole):
    """The outer loop of one node, step by step."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        manifest: Manifest,
        link: DaemonLink,
        team: Team,
        *,
        checkpoint: Path,
        stop_round: int,
        beside: Beside | None = None,
    ) -> None:
        """Raises ConfigError if the model does not fit the manifest."""
        super().__init__(link, team, stop_round=stop_round, beside=beside)
        self._link: DaemonLink = link
        self._saved_optimizers = tuple(optimizers) if team.size == 1 else ()
        self._checkpoint_path = checkpoint
        self._checkpoint = CheckpointWriter(checkpoint)
        self._outer = OuterLoop(team.bind(manifest.plan()), manifest)
        self._incoming = Incoming(link, self._outer.fragments, Staging(self._outer.fragments))
        self._binding = Binding(model, manifest)
        self._codec = manifest.outer.codec
        self._pace = Pace(manifest.pace, manifest.layout.fragments)
        self._has_stepped = False
        self._steps_since = 0
        self._published_at = time.monotonic()
        self._window_loss = 0.0
        """Mean loss of the last published window with a finite one. It becomes `last_loss` once all ranks
        know it."""
        self._share_waits = False
        self._has_diverged = False
        """Whether the model has diverged since the last delta."""
        self._idle = IdleWatch(len(self._outer.fragments))
        self._step_watch = StepWatch(self._saved_optimizers)

    # -- what the loop does

    def begin(self, on_wait: Callable[[], None] | None = None) -> bool:
        missing = set(range(len(self._outer.fragments)))
        while missing and not self.should_stop:
            offers = self._incoming.take()
            with self._changing(offers):
                for offer in offers:
                    self._load(offer)
                    missing.discard(offer.fragment)
            if not offers:
                time.sleep(POLL_S)
                if on_wait is not None:
                    on_wait()
        restored = restore(self._checkpoint_path, self._outer, self._saved_optimizers)
        if restored is not None:
            self.progress, self.resumed = restored
            if self.team.size > 1 and self.progress.steps:
                log.info("with several ranks, the inner optimizer's state is not kept: it starts afresh")
        word = self._agree(done=DONE)
        self.begun_at = time.perf_counter()
        self._published_at = time.monotonic()
        return not missing and not (word.stop and self.team.size > 1)

    def step(self, tokens: int, loss: float | Tensor) -> int | None:
        begun = time.perf_counter()
        self._has_stepped = True
        self._step_watch.begin_anew()
        self.is_stepping = self.team.size > 1  # several ranks are out of step until this is over
        round_ = self._due()
        offers = self._incoming.take_for_step(round_)
        if self.team.size == 1 and not offers and round_ is None:
            self._note(tokens, loss)  # most steps: no ranks to agree with, and nothing to do
        else:
            with self._changing(offers, round_, tokens):
                self._note(self._word.tokens, loss)
                for offer in offers:
                    self._apply(offer)
                if round_ is not None:
                    self._publish(round_)
        self.is_stepping = False
        self._checkpoint_if_due(round_)
        self.outer_s += time.perf_counter() - begun
        return round_

    def await_daemon(self, timeout_s: float) -> None:
        self.stop_requested = False
        deadline = time.monotonic() + timeout_s
        while self._outer.has_open_windows and not self.finished and not self._link.is_attached:
            if self._is_told_to_stop() or time.monotonic() >= deadline:
                return
            time.sleep(POLL_S)

    def flush(self, timeout_s: float) -> None:
        self.stop_requested = False
        while self._agree(leaving=1).leaving < self.team.size:
            pass  # a rank that still trains hears of it at its next step
        self._warn_of_a_loop_without_steps()
        left = timeout_s
        if self._outer.has_open_windows and not self.finished:
            # What the window holds can be handed over once the last delta is acknowledged.
            left -= self._link.wait_free(timeout_s / 2)
            if not self._link.can_publish:
                log.warning(
                    "what this node has learnt since its last delta is not published: its daemon %s",
                    "has yet to store that one" if self._link.is_attached else "does not answer",
                )
        round_ = self._due_at_the_end()
        with self._changing([], round_):
            if round_ is not None:
                self._publish(round_)
        if not self._step_watch.is_torn:  # if it is, by Ctrl-C say, the last checkpoint is better
            self._checkpoint.save(self._outer, self._sound_optimizers, self.progress)
        if not self._link.wait_acknowledged(left):
            log.warning(
                "the node's daemon has yet to store the delta of round %d, which is lost if the node ends"
                " before",
                self._link.own_last,
            )

    def save_if_whole(self) -> None:
        if self.team.size > 1 or self.is_stepping or self._has_diverged or not self.progress.steps:
            return
        if not self._step_watch.is_whole:
            return
        try:
            self._outer.check()
        except DivergedError:
            self._has_diverged = True
        except Exception:  # such as a failed device, which has ended training
            return
        else:
            self._checkpoint.save(self._outer, self._sound_optimizers, self.progress)

    def drop_progress(self) -> None:
        self._binding.check(seldom=False)  # parameters that a script has replaced are not the swarm's
        everything = frozenset(range(len(self._outer.fragments)))
        self._agree(everything)
        with held_back(), self.team.full(everything):
            self._outer.reset()
            self._steps_since = 0

    def settle(self) -> bool:
        offers = self._incoming.take()
        with self._changing(offers):
            for offer in offers:
                self._load(offer)
        return bool(offers) or self._link.unmerged > 0 or not self._link.can_publish

    def agree_done(self, done: int) -> int:
        return self._agree(done=done).done

    def report(self, report: control.Report) -> None:
        self._link.send(report)

    def close(self) -> None:
        self._step_watch.end()
        try:
            self._incoming.close()
            if self._has_diverged:  # an earlier checkpoint could make the next process diverge at once
                self._checkpoint.save(self._outer, (), self.progress)
            self._checkpoint.close()
        finally:
            super().close()

    # -- agreeing with the other ranks

    def _agree(
        self,
        touched: frozenset[int] = frozenset(),
        *,
        tokens: int = 0,
        leaving: int = 0,
        done: int = 0,
        round_: int = 0,
    ) -> Word:
        self._word = self.team.agree(
            Word(
                tokens=tokens,
                stop=int(self._is_told_to_stop()),
                leaving=leaving,
                done=done,
                own_last=max(self._link.own_last, round_),
                clock=self._link.clock,
                swarm_tokens=self._link.swarm_tokens,
                links=self._link.links,
                version=self.version,
                taken=self.taken,
                steps=self.progress.steps,
                own_tokens=self.progress.tokens,
                loss=self._window_loss,
                touched=touched,
            )
        )
        self.last_loss = self._word.loss
        return self._word

    @contextmanager
    def _changing(
        self, offers: Sequence[Offer] = (), round_: int | None = None, tokens: int = 0
    ) -> Iterator[None]:
        """Agree with the other ranks on what changes now. Inside, those fragments are here in full, and
        Ctrl-C is held back.
        """
        if offers or round_ is not None:
            self._binding.check()
        touched = {offer.fragment for offer in offers}
        if round_ is not None:
            touched.add(round_ % len(self._outer.fragments))
        if offers:
            # Offers come in order, so the last is the newest; a restarted daemon counts from 0 again.
            self.version, self.taken = offers[-1].version, self.taken + 1
        before = self._word
        self._agree(frozenset(touched), tokens=tokens, round_=round_ or 0)
        with held_back() if touched else nullcontext():
            self.is_stepping = True
            try:
                with self.team.full(frozenset(touched)):
                    yield
            except DivergedError:  # nothing is half done: a script may repair the model and go on
                self.is_stepping, self._has_diverged = False, True
                self._word = before
                raise
            self.is_stepping = False

    # -- the parts of a step

    def _note(self, tokens: int, loss: float | Tensor) -> None:
        self._outer.step(tokens, loss)
        so_far = min(self.progress.tokens + tokens, OWN_TOKENS_MAX)
        self.progress = Progress(self.progress.steps + 1, so_far)
        self._steps_since += 1

    def _due(self) -> int | None:
        """The round to publish at this step, if any."""
        if not self._link.can_publish:
            return None
        seconds = time.monotonic() - self._published_at
        steps = self._steps_since + 1
        round_ = self._pace.due(self._link.own_last, self._link.clock, steps, seconds)
        return None if round_ is not None and 0 < self._stop_round < round_ else round_

    def _due_at_the_end(self) -> int | None:
        """The round to publish before leaving, however short its window.

        None if the window holds no step, or if the swarm has not come to that round yet.
        """
        if self.finished or not self._link.can_publish:
            return None
        # The clock may be unknown, after a sleep. Then the window's delta is published however late it is.
        clock = self._link.clock if self._link.clock >= 0 else self._link.own_last
        round_ = max(self._link.own_last + 1, clock)
        window = self._outer.fragments[round_ % len(self._outer.fragments)].window
        return round_ if window.steps > 0 and round_ <= clock + 1 else None

    def _warn_of_a_loop_without_steps(self) -> None:
        if not self._has_stepped and self.team.size == 1 and self._outer.has_moved:
            log.warning(
                "the model has changed since it was attached, but step was never called: no such change"
                " reaches the swarm. Call peer.step(tokens, loss) after each step of the optimizer"
            )

    def _publish(self, round_: int) -> None:
        index = round_ % len(self._outer.fragments)
        area = self._link.payload_area
        length, window = self._outer.publish(index, round_, area)
        self._idle.look(index, window.changed)
        # The loss is only for displays: one that overflowed (float16 before its scaler has settled) must not
        # cost the delta.
        loss = window.mean_loss
        if isfinite(loss):
            self._window_loss = max(-LOSS_MAX, min(LOSS_MAX, loss))
        if self.team.size == 1:  # several ranks hear of it with the next word
            self.last_loss = self._window_loss
        self._link.publish(
            control.Publish(
                round=round_,
                base=window.base,
                tokens=min(window.tokens, TOKENS_MAX),
                steps=min(window.steps, STEPS_MAX),
                loss=self._window_loss,
                codec=self._codec,
                payload_bytes=length,
            ),
            area,
        )
        self._steps_since = 0
        self._published_at = time.monotonic()
        self._has_diverged = False

    @property
    def _sound_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        """The optimizers whose state is saved: none once the model has diverged, since it may be the
        cause."""
        return () if self._has_diverged else self._saved_optimizers

    def _checkpoint_if_due(self, round_: int | None) -> None:
        """Begin a checkpoint if one is due, and copy a share of the one that was begun.

        A step that publishes leaves this to the next step, but not twice in a row.
        """
        if round_ is not None and not self._share_waits:
            self._share_waits = True
            return
        self._share_waits = False
        self._checkpoint.step(self._outer, self._sound_optimizers, self.progress)

    def _apply(self, offer: Offer) -> None:
        """Take Phi over, and keep the progress of the open windows on top of it."""
        self._outer.apply(offer.fragment, self._incoming.values(offer), offer.merged_round)
        self._incoming.took(offer)

    def _load(self, offer: Offer) -> None:
        """Take Phi over as it is, and drop local progress."""
        state = self._outer.fragments[offer.fragment]
        state.last_published = max(state.last_published, offer.own_round)
        phi = self._incoming.values(offer)
        self._outer.apply(offer.fragment, phi, offer.merged_round, keep_progress=False)
        self._incoming.took(offer)
