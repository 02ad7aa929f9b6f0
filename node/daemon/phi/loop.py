"""When to merge: once something new has arrived and the trainer is about to look, not once per arrival.

Rounds that changed are marked dirty. They are merged in a worker thread as soon as the trainer has taken the
last offer of their fragment (or a second has passed, or there is no trainer). Then the new Phi is offered to
the trainer.

Where many rounds wait, the newest and the oldest take turns. So the trainer has what was published last
however many old rounds change, and the old rounds are all merged in the end.
"""

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable

from gossamer.node.daemon.phi.state import Merger, Prefix, RecentDigest
from gossamer.node.daemon.storage.chunks import MissingChunkError
from gossamer.node.daemon.storage.records import GENESIS, Base
from gossamer.node.daemon.trainer_port import TrainerPort
from gossamer.node.ipc import messages as control
from gossamer.node.logs import Fault, RateLimit
from gossamer.protocol.errors import DivergedError, StorageError
from gossamer.protocol.membership.members import listed
from gossamer.protocol.merge.contributions import Conduct, RoundFigures
from gossamer.protocol.merge.schedule import MergeSchedule
from gossamer.protocol.payloads.layout import Fragment
from gossamer.protocol.records import Delta
from gossamer.protocol.replica import Replica

# --- Offering Phi to the trainer: each changed fragment, once the trainer has taken the last offer of it.


class Offering:
    """Which fragments the current trainer does not have yet, and how they are offered to it."""

    def __init__(
        self, core: Replica, port: TrainerPort, schedule: MergeSchedule, before: Callable[[], None]
    ) -> None:
        """`before` is called before a fragment is offered: the trainer must know first how many tokens it is
        of."""
        self._before = before
        self._core = core
        self._port = port
        self._schedule = schedule
        self._unoffered: set[int] = set()
        self._attachments = 0

    def changed(self, index: int) -> None:
        """A fragment has changed since the trainer was offered it."""
        self._unoffered.add(index)

    def all_changed(self) -> None:
        self._unoffered.update(fragment.index for fragment in self._core.layout.fragments)

    def look_for_a_new_trainer(self) -> None:
        """A trainer that has just attached has no fragments yet."""
        if self._port.attachments != self._attachments:
            self.all_changed()
        self._attachments = self._port.attachments

    async def offer(self, merger: Merger) -> None:
        """Offer all changed fragments, except those that diverged or whose last offer was not taken."""
        for index in sorted(self._unoffered):
            if index not in merger.diverged and self._port.attached and self._port.is_free(index):
                fragment = self._core.layout.fragments[index]
                self._unoffered.discard(index)
                self._before()
                await self._port.offer(fragment, merger.view(fragment), self._told_of(fragment, merger))

    def _told_of(self, fragment: Fragment, merger: Merger) -> control.Phi:
        """How far a fragment has been merged.

        If we started again where the swarm is far behind our own last delta, the trainer need not wait for
        that delta: it is not merged until the swarm has got there.
        """
        state = merger.state(fragment)
        last = self._core.ledger.last_round(self._core.identity.node_id)
        own_round = state.own_round
        if last > self._schedule.horizon:
            own_round = max(own_round, last - (last - fragment.index) % len(self._core.layout.fragments))
        return control.Phi(fragment.index, state.merged_round, own_round, state.version)


GATHER_S = 0.02
"""Arrivals within this time of each other are merged together."""

PATIENCE_S = 1.0
"""A trainer that has taken nothing for this long after a merge does not hold up the next one."""

RETRY_S = 5.0

OnJudged = Callable[[int, tuple[Delta, ...], RoundFigures | None], None]

log = logging.getLogger("gossamer.merging")


class Merging:
    """Keeps Phi up to date with the core's ledger, and the trainer with Phi."""

    def __init__(
        self,
        core: Replica,
        port: TrainerPort,
        chunk_lost: Callable[[bytes], None],
        *,
        on_merged: Callable[[int], None],
        on_judged: OnJudged,
        before_offer: Callable[[], None],
    ) -> None:
        """`chunk_lost` is called with the hash of a payload chunk that turned out damaged on disk.

        `on_merged` is called with every round that was merged; `on_judged` after every merge, with the round,
        all deltas merged in it, and what was found in them; `before_offer` before a fragment is offered.
        """
        self._core = core
        self._port = port
        self.chunk_lost = chunk_lost
        self.on_merged = on_merged
        self.on_judged = on_judged
        self.seconds = 0.0
        """Wall time spent in merges so far."""
        self.conduct = Conduct()
        """Figures of every member's deltas."""
        self._merger: Merger | None = None
        self._begun = asyncio.Event()
        self.schedule = MergeSchedule(core)
        self.offering = Offering(core, port, self.schedule, before_offer)
        self.recent_digest = RecentDigest(self.digest)
        self._fault = Fault(log, "payloads can be read again")
        self._held_back_limit = RateLimit()
        self._diverged_by: dict[int, str] = {}
        """By fragment that diverged here: text that says in which round, and by whose deltas."""
        self._merged_at: dict[int, float] = {}
        self._news = asyncio.Event()
        self._merged_some = asyncio.Event()
        self._busy = asyncio.Lock()

    @property
    def ready(self) -> bool:
        """Whether Phi holds all that the swarm had when we joined: the trainer may begin."""
        return self.schedule.ready

    @property
    def reach(self) -> int:
        """The newest round merged, by this run or an earlier one."""
        return self.schedule.reach

    @property
    def tokens(self) -> int:
        """Tokens that the swarm has trained on, as counted over all deltas merged."""
        return self._core.layout.trained_tokens(self._merger.tokens) if self._merger else 0

    @property
    def version(self) -> int:
        """Counts the merges so far."""
        return self._merger.version if self._merger else 0

    @property
    def behind(self) -> int:
        """Number of rounds that have changed and are not merged yet, without those that wait."""
        return len(self.schedule.to_merge(time.monotonic()))

    @property
    def unmerged(self) -> int:
        """How much keeps Phi from being what the swarm has; 0 if nothing does.

        Counts rounds that have changed and are not merged, also those that wait for others' deltas or for the
        swarm; one more while payloads are on their way; and one more until we are `ready`.
        """
        return self.schedule.unmerged + self._core.fetcher.wants.any_has_holder + (not self.ready)

    @property
    def diverged(self) -> str:
        """Which fragment of Phi is out of the range of healthy weights, and by whose deltas, if this run saw
        it happen; empty if none is.

        Such a fragment is not offered to the trainer. Merging into it goes on, since an owner of the swarm
        may yet declare those deltas void.
        """
        diverged = self._merger.diverged if self._merger else ()
        if not diverged:
            return ""
        index = min(diverged)
        return f"fragment {index} reached a magnitude of 64{self._diverged_by.get(index, '')}"

    @property
    def base(self) -> Base:
        """The part of history that cannot change any more."""
        return self._merger.base if self._merger else GENESIS

    async def begin(self, merger: Merger, reach: int = 0, tell: Callable[[], None] = lambda: None) -> None:
        """Take over a state, at the start or in place of ours; records above its base are merged into it.

        `reach` is the newest round merged in the state that the node goes on from. `tell` is called before
        the ledger is looked at: the core may drop records then.
        """
        async with self._busy:
            if self._merger is not None:
                merger.version = self._merger.version + 1
            self._merger = merger
        tell()
        self.schedule.begin(merger.base.round, reach)
        self.offering.all_changed()
        self._begun.set()
        self._news.set()

    async def settled(self, round_: int) -> bool:
        """Wait until no round up to this one waits to be merged, or is being merged.

        Returns whether that is so. It does not wait for rounds that the swarm cannot have reached, which may
        take hours: if only such rounds are left, it returns False.
        """
        while True:
            async with self._busy:
                waiting = self.schedule.waiting(round_)
                if not waiting or waiting[0] > self.schedule.merge_up_to:
                    return not waiting
            self._merged_some.clear()
            await self._merged_some.wait()

    async def prefix(self, fragment: Fragment, upto: int) -> Prefix:
        """A fragment as of a round, see `Merger.prefix`; not before `begin`. Raises MissingChunkError."""
        assert self._merger is not None
        async with self._busy:
            return await asyncio.to_thread(self._merger.prefix, fragment, upto)

    async def close_up_to(self, floor: int, may_close: Callable[[], bool]) -> Base | None:
        """Make everything up to a round unchangeable; returns the new base, None if ours lies higher.

        `may_close` is called while no merge is under way. If it returns False, nothing changes, and None is
        returned.
        """
        if self._merger is None or floor < self._merger.base.round:
            return None
        async with self._busy:
            if not may_close():
                return None
            await asyncio.to_thread(self._merger.close_up_to, floor)
        self.schedule.close(floor)
        return self._merger.base

    def mark(self, round_: int) -> None:
        """A round's set of complete, valid records has changed."""
        self.schedule.mark(round_)
        self._news.set()

    def look(self) -> None:
        """The trainer took an offer, came or went."""
        self._news.set()

    async def run(self) -> None:
        """Merge until cancelled. Raises DivergedError if our own training has taken Phi out of range."""
        await self._begun.wait()
        due: deque[int] = deque()
        newest_next = True
        while True:
            if not due:
                await self._wait_for_news()
                await asyncio.sleep(GATHER_S)
                newest_next = True
            self.offering.look_for_a_new_trainer()
            if not due or self._news.is_set():
                self._news.clear()
                due = self._due(due)
            if due:
                await self._merge(due.pop() if newest_next else due.popleft())
                newest_next = not newest_next
            self._merged_some.set()
            self.schedule.look_whether_ready(time.monotonic())
            if self.ready:
                assert self._merger is not None
                await self.offering.offer(self._merger)

    async def _wait_for_news(self) -> None:
        """Sleep until something changed; while anything is held up, look again soon."""
        held_up = self.schedule.unmerged > 0 or not self.ready
        try:
            async with asyncio.timeout(PATIENCE_S / 4 if held_up else None):
                await self._news.wait()
        except TimeoutError:
            pass

    def _due(self, still: deque[int]) -> deque[int]:
        """The rounds to merge now, in order.

        A round once due stays due: it need not wait until the trainer has taken the merges before it.
        """
        reached = self.schedule.look(time.monotonic())
        count = len(self._core.layout.fragments)
        waiting = {index for index in range(count) if not self._is_due(index)}
        if not waiting:
            return deque(reached)
        known = set(still)
        return deque(round_ for round_ in reached if round_ in known or round_ % count not in waiting)

    async def _are_outliers(self, round_: int, deltas: tuple[Delta, ...]) -> bool:
        """Whether these deltas stand alone in a round and are outliers. Raises MissingChunkError."""
        assert self._merger is not None
        alone = self.schedule.stand_alone(round_, deltas)
        return alone and await asyncio.to_thread(self._merger.are_outliers, round_, deltas)

    def _hold_back(self, round_: int, deltas: tuple[Delta, ...]) -> None:
        self.schedule.hold_back(round_, time.monotonic())
        names = ", ".join(self._core.roster.label(delta.author) for delta in deltas)
        if self._held_back_limit.allows(names):
            log.info("%s: delta far beyond the usual; round %d waits for deltas of others", names, round_)

    def _is_due(self, fragment: int) -> bool:
        """Whether the trainer has taken what was merged last into a fragment, or is not waited for."""
        if not self._port.attached:
            return True
        waited = time.monotonic() - self._merged_at.get(fragment, 0.0)
        return self._port.is_free(fragment) or waited > PATIENCE_S

    async def _merge(self, round_: int) -> None:
        assert self._merger is not None
        merger = self._merger
        deltas: tuple[Delta, ...] = ()
        try:
            async with self._busy:
                if merger is not self._merger:  # replaced by `begin`, after which all rounds are dirty again
                    return
                if round_ <= self._core.ledger.floor:  # closed while the rounds before it were merged
                    return
                # Not earlier: whoever waits for the lock to see whether this round is merged must see that it
                # is not.
                has_waited = self.schedule.take(round_)
                fragment = self._core.layout.of_round(round_)
                before, was_sound = merger.version, fragment.index not in merger.diverged
                deltas = tuple(d for d in self._core.ledger.valid(round_) if self._core.holds(d.record_id))
                if not has_waited and await self._are_outliers(round_, deltas):
                    self._hold_back(round_, deltas)
                    return
                begun = time.monotonic()
                await asyncio.to_thread(merger.merge, round_, deltas)
                self.seconds += time.monotonic() - begun
        except MissingChunkError as error:
            self.chunk_lost(error.blob)
            if not all(self._core.holds(delta.record_id) for delta in deltas):
                self.schedule.put_back(round_)  # without that delta, until it is here again
            return
        except StorageError as error:
            self._fault.failed(f"{error}; trying again every {RETRY_S:.0f} s", event="reading")
            self.schedule.put_back(round_)
            await asyncio.sleep(RETRY_S)
            return
        self._fault.worked()
        self._judge(round_)
        self.on_judged(round_, deltas, self._merger.figures)
        if self._merger.version == before:
            return
        self.schedule.merged(round_)
        self.on_merged(round_)
        self._merged_at[fragment.index] = time.monotonic()
        self.offering.changed(fragment.index)
        if was_sound and fragment.index in self._merger.diverged:
            self._note_diverged(fragment.index, round_, deltas)

    def _note_diverged(self, index: int, round_: int, deltas: tuple[Delta, ...]) -> None:
        """End a training that has diverged: raises DivergedError, if a delta of ours was in it.

        If only others' deltas did it, as a single key's can in a swarm that rests, we are still needed: we
        have to hear that those deltas are void.
        """
        names = listed(self._core.roster.label(delta.author) for delta in deltas) or "nobody"
        self._diverged_by[index] = f" in round {round_}, of {names}"
        if any(delta.author == self._core.identity.node_id for delta in deltas):
            raise DivergedError(
                f"{self.diverged}: training diverged. Start again with a lower learning rate, or rescale"
                " what needs such values."
            )

    def _judge(self, round_: int) -> None:
        """Note what a merge found in its round, and log whose verdicts began or ended: a line for each
        verdict, since anybody may be hundreds of members."""
        assert self._merger is not None
        found = self._merger.figures or RoundFigures({}, None)
        labels = defaultdict[str | None, list[str]](list)
        for change in self.conduct.note(round_, found, self._core.ledger.void_in(round_)):
            labels[change.verdict].append(self._core.roster.label(change.node_id))
        for verdict, alike in labels.items():
            if verdict is None:
                log.info("%s: deltas are normal again", listed(alike))
            else:
                log.warning("%s: %s", listed(alike), verdict)

    async def digest(self) -> tuple[bytes, bytes] | None:
        """Digest of the records merged, and of Phi; None before genesis is here."""
        if self._merger is None:
            return None
        async with self._busy:
            chain = await asyncio.to_thread(self._merger.chain)
            return chain, await asyncio.to_thread(self._merger.digest)

    async def prefix_digest(self, up_to: int) -> bytes | None:
        """Digest of the records merged up to a round; None if it is closed already, or nothing is here."""
        if self._merger is None:
            return None
        async with self._busy:
            if up_to < self._merger.base.round:
                return None
            return await asyncio.to_thread(self._merger.chain, up_to)
