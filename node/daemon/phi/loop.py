"""Carries out the merges that the core asks for, and offers Phi to the trainer.

The core decides when to merge a round (`protocol.merge.schedule`): `Merge` out, `Merged` in, one at a time.
Each merge runs in a worker thread. Then each fragment that has changed is offered to the trainer, once the
trainer has taken the last offer of it.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.phi.state import PhiState, Snapshot
from gossamer.node.daemon.storage.chunks import MissingChunkError
from gossamer.node.daemon.storage.records import GENESIS, Base, Rounds
from gossamer.node.daemon.trainer_port import TrainerPort
from gossamer.node.ipc import messages as control
from gossamer.node.logs import RateLimit
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.errors import DivergedError, StorageError
from gossamer.protocol.events import MergeOutcome
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.history.average import Sums
from gossamer.protocol.membership.members import listed
from gossamer.protocol.merge.contributions import ContributionStats, RoundFigures
from gossamer.protocol.payloads import Fragment
from gossamer.protocol.replica import Replica
from gossamer.protocol.sampling import EVERY_ROUND

POLL_S = 0.25
SETTLE_POLL_S = 0.05

RETRY_S = 5.0

REST = 9
"""A digest that anybody may ask for is kept for this many times as long as it took to compute: so merging,
which waits meanwhile, waits for a tenth of the time at most."""


class Digests(NamedTuple):
    """Of all that is merged."""

    merged: bytes
    """Of the records."""
    phi: bytes
    average: bytes
    """Of the averaged model; empty while it is not here."""
    average_round: int
    """The round that the average is as of."""


OnMerged = Callable[[fx.Merge, RoundFigures | None, bool], None]
"""Called after every merge with what was found in the round's deltas, and whether Phi has changed."""

log = logging.getLogger("gossamer.merging")


class MergeLoop:
    """Keeps Phi up to date with the core's ledger, and the trainer with Phi."""

    def __init__(
        self,
        core: Replica,
        port: TrainerPort,
        dispatch: Callable[[ev.Event], object],
        damaged: Callable[[bytes], None],
        on_merged: OnMerged,
        before_offer: Callable[[], None],
    ) -> None:
        """`damaged` is called with the hash of a payload chunk that turned out damaged on disk;
        `before_offer` before a fragment is offered: the trainer must know first how many tokens it is of."""
        self._core = core
        self._port = port
        self._dispatch = dispatch
        self._damaged = damaged
        self._on_merged = on_merged
        self._before_offer = before_offer
        self.seconds = 0.0
        """Wall time spent in merges so far."""
        self.begun = 0
        """How often `begin` was called: each time with another history."""
        self.contributions = ContributionStats()
        """Figures of every member's deltas."""
        self._state: PhiState | None = None
        self._due: fx.Merge | None = None
        self._unoffered: set[int] = set()
        """Fragments that have changed since the trainer was offered them."""
        self._limit = RateLimit()
        self._diverged_by: dict[int, str] = {}
        """By fragment that diverged here: text that says in which round, and by whose deltas."""
        self._news = asyncio.Event()
        self._busy = asyncio.Lock()
        self._asked = asyncio.Lock()
        self._digest: Digests | None = None
        self._digest_until = 0.0

    # -- how far it is

    @property
    def ready(self) -> bool:
        """Whether Phi holds all that the swarm had when we joined: the trainer may begin."""
        return self._core.merges.ready

    @property
    def tokens(self) -> int:
        """Tokens that the swarm has trained on, as counted over all deltas merged."""
        return self._core.layout.trained_tokens(self._state.tokens) if self._state else 0

    @property
    def pace(self) -> tuple[int, int, int]:
        """Of the round to come, the steps in a window (0 if they are counted in seconds, or without Phi), and
        how often members contribute (see `sampling.is_drawn`); and the round after which that holds."""
        return self._state.pace(self._core.clock + 1) if self._state else (0, EVERY_ROUND, 0)

    @property
    def window_why(self) -> str:
        """See `Windows.why`."""
        return self._state.windows.why if self._state else ""

    @property
    def version(self) -> int:
        """Counts the merges so far."""
        return self._state.version if self._state else 0

    @property
    def base(self) -> Base:
        """The part of history that cannot change any more."""
        return self._state.base if self._state else GENESIS

    @property
    def unmerged(self) -> int:
        """How much keeps Phi from being what the swarm has; 0 if nothing does.

        Counts rounds that have changed and are not merged, also those that wait for others' deltas or for the
        swarm; one more while payloads are on their way; and one more until we are `ready`.
        """
        return self._core.merges.unmerged + self._core.fetcher.wants.any_has_holder + (not self.ready)

    @property
    def diverged(self) -> str:
        """Which fragment of Phi is out of the range of healthy weights, and by whose deltas, if this run saw
        it happen; empty if none is. It is not offered to the trainer, but merged on: an owner of the swarm
        may yet declare those deltas void."""
        if self._state is None or not self._state.diverged:
            return ""
        index = min(self._state.diverged)
        return f"fragment {index} reached a magnitude of 64{self._diverged_by.get(index, '')}"

    # -- the state

    async def begin(self, state: PhiState, tell: Callable[[], None] = lambda: None) -> None:
        """Take over a state, at the start or in place of ours: what was to be merged into that one is not.

        `tell` tells the core at once: by the history before, later rounds could be merged than the swarm is
        at.
        """
        async with self._busy:
            if self._state is not None:
                state.version = self._state.version + 1
            self._state, self._due = state, None
            self.begun += 1
            tell()
        self.offer_all()

    async def settled(self, round_: int) -> bool:
        """Wait until no round up to this one waits to be merged, or is being merged.

        Returns whether that is so. It does not wait for rounds that the swarm cannot have reached, which may
        take hours: if only such rounds are left, it returns False.
        """
        core, merges = self._core, self._core.merges
        while (waiting := merges.waiting(round_)) and waiting[0] <= merges.merge_up_to(core.swarm):  # noqa: ASYNC110
            await asyncio.sleep(SETTLE_POLL_S)
        return not waiting

    async def prefix(self, fragment: Fragment, upto: int) -> tuple[Ints, Rounds, Sums | None]:
        """A fragment as of a round, see `PhiState.prefix`, and its `PhiState.sums`; not before `begin`.
        Raises as these do."""
        state = self._state
        assert state is not None

        def both() -> tuple[Ints, Rounds, Sums | None]:
            phi, rounds = state.prefix(fragment, upto)
            return phi, rounds, state.sums(fragment, upto, phi, rounds)

        async with self._busy:
            return await asyncio.to_thread(both)

    def note_sealed(self, sealed: Snapshot) -> None:
        """See `PhiState.note_sealed`; not before `begin`."""
        assert self._state is not None
        self._state.note_sealed(sealed)

    async def close_up_to(self, floor: int, may_close: Callable[[], bool]) -> bool:
        """Make everything up to a round unchangeable, unless `may_close` refuses it while no merge is under
        way; returns whether that is done. Not before `begin`."""
        assert self._state is not None
        async with self._busy:
            if not may_close():
                return False
            await asyncio.to_thread(self._state.close_up_to, floor)
        return True

    def merge(self, effect: fx.Merge) -> None:
        """The core asks for a merge."""
        self._due = effect
        self._news.set()

    def look(self) -> None:
        """The trainer took an offer, came or went."""
        self._news.set()

    async def run(self) -> None:
        """Merge until cancelled. Raises DivergedError if our own training has taken Phi out of range."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(None if self.ready else POLL_S):
                    await self._news.wait()
            self._news.clear()
            if self._due is not None:
                await self._merge(self._due)
            if self.ready and self._state is not None:
                await self._offer(self._state)

    # -- merging

    async def _merge(self, effect: fx.Merge) -> None:
        async with self._busy:
            if effect is not self._due or self._state is None:  # replaced by `begin`
                return
            state, self._due = self._state, None
            index = self._core.layout.of_round(effect.round).index
            was_sound = index not in state.diverged
            outcome = await self._carry_out(effect, state)
            found = state.figures.agreement if state.figures else None
            self._dispatch(ev.Merged(effect.round, outcome, round(1000 * (1.0 if found is None else found))))
        if outcome in (MergeOutcome.CHANGED, MergeOutcome.SAME):
            self._judge(state, effect.round)
            self._on_merged(effect, state.figures, outcome is MergeOutcome.CHANGED)
        if outcome is MergeOutcome.CHANGED:
            self._unoffered.add(index)
            if was_sound and index in state.diverged:
                names = listed(self._core.roster.label(delta.author) for delta in effect.deltas) or "nobody"
                self._diverged_by[index] = f" in round {effect.round}, of {names}"
                # If only others did it, as a key can in a swarm that rests, we are needed to hear it is void.
                if any(delta.author == self._core.identity.node_id for delta in effect.deltas):
                    raise DivergedError(
                        f"{self.diverged}: training diverged. Start again with a lower learning rate, or"
                        " rescale what needs such values."
                    )

    async def _carry_out(self, effect: fx.Merge, state: PhiState) -> MergeOutcome:
        round_, deltas = effect.round, effect.deltas
        try:
            if effect.unless_outliers and await asyncio.to_thread(state.are_outliers, round_, deltas):
                names = ", ".join(self._core.roster.label(delta.author) for delta in deltas)
                if self._limit.allows(names):
                    log.info(
                        "%s: delta far beyond the usual; round %d waits for deltas of others", names, round_
                    )
                return MergeOutcome.OUTLIERS
            begun = time.monotonic()
            has_changed = await asyncio.to_thread(state.merge, round_, deltas)
            self.seconds += time.monotonic() - begun
        except MissingChunkError as error:
            self._damaged(error.blob)
            return MergeOutcome.FAILED
        except StorageError as error:  # too many open files, say: it passes
            if self._limit.allows("reading"):
                log.error("%s; trying again", error)
            await asyncio.sleep(RETRY_S)
            return MergeOutcome.FAILED
        return MergeOutcome.CHANGED if has_changed else MergeOutcome.SAME

    def _judge(self, state: PhiState, round_: int) -> None:
        """Note what a merge found in its round, and log whose verdicts began or ended: a line for each
        verdict, since anybody may be hundreds of members."""
        found = state.figures or RoundFigures({}, None)
        labels = defaultdict[str | None, list[str]](list)
        for change in self.contributions.note(round_, found, self._core.ledger.void_in(round_)):
            labels[change.verdict].append(self._core.roster.label(change.node_id))
        for verdict, alike in labels.items():
            if verdict is None:
                log.info("%s: deltas are normal again", listed(alike))
            else:
                log.warning("%s: %s", listed(alike), verdict)

    # -- offering Phi to the trainer

    def offer_all(self) -> None:
        """Offer all fragments: Phi is another one, or the trainer is, and has none yet."""
        self._unoffered.update(fragment.index for fragment in self._core.layout.fragments)
        self._news.set()

    async def _offer(self, state: PhiState) -> None:
        """Offer all changed fragments, except those that diverged or whose last offer was not taken."""
        for index in sorted(self._unoffered):
            if index not in state.diverged and self._port.is_free(index):
                fragment = self._core.layout.fragments[index]
                self._unoffered.discard(index)
                self._before_offer()
                await self._port.offer(fragment, state.view(fragment), self._progress(fragment, state))

    def _progress(self, fragment: Fragment, state: PhiState) -> control.Phi:
        """How far a fragment has been merged.

        If we started again where the swarm is far behind our own last delta, the trainer need not wait for
        that delta: it is not merged until the swarm has got there.
        """
        merged_round, own_round = state.reach(fragment)
        last = self._core.ledger.last_round(self._core.identity.node_id)
        if last > self._core.merges.merge_up_to(self._core.swarm):
            own_round = max(own_round, last - (last - fragment.index) % len(self._core.layout.fragments))
        return control.Phi(fragment.index, merged_round, own_round, state.version)

    # -- comparing replicas

    async def digest(self) -> Digests | None:
        """Digests of what is merged, as it is or was a moment ago; None before genesis is here."""
        async with self._asked:
            begun = time.monotonic()
            if self._state is not None and begun >= self._digest_until:
                async with self._busy:
                    self._digest = await asyncio.to_thread(_digests, self._state)
                now = time.monotonic()
                self._digest_until = now + REST * (now - begun)
            return self._digest

    async def prefix_digest(self, up_to: int) -> bytes | None:
        """Digest of the records merged up to a round; None if it is closed already, or nothing is here."""
        async with self._busy:
            if self._state is None or up_to < self._state.base.round:
                return None
            return await asyncio.to_thread(self._state.chain, up_to)


def _digests(state: PhiState) -> Digests:
    try:
        upto, average = state.average() or (0, None)
    except StorageError:  # a damaged chunk, which is fetched again once it is needed
        upto, average = 0, None
    of_average = b"" if average is None else snapshots.digest(average)
    return Digests(state.chain(), state.digest(), of_average, upto)
