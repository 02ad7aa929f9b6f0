"""Watches a daemon from inside, once a second: the chronicle, the notices, the rates, the vitals.

Nothing that the node does for the swarm depends on it, and a fault in here is only logged.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gossamer.node.daemon.monitoring.events import Happenings, Notices
from gossamer.node.daemon.monitoring.health import Look, Vitals
from gossamer.node.daemon.monitoring.round_history import Chronicle, ChronicleStore, Evaluations
from gossamer.node.daemon.monitoring.status import NodeView, Rates
from gossamer.node.daemon.network.listening import is_gone
from gossamer.node.home import Home, runs_out_soon
from gossamer.protocol.errors import RefusedError, StorageError
from gossamer.protocol.membership.members import Health
from gossamer.protocol.merge.contributions import RoundFigures
from gossamer.protocol.records import Delta

TICK_S = 1.0
SAVE_TICKS = 5
"""A node that is killed loses this many seconds of its chronicle; its records are not affected."""

DISK_TICKS = 10

HEALTHY_STATES = frozenset({"starting", "training", "serving", "finished"})
STEPPING_STATES = frozenset({"starting", "training"})
"""States in which the next thing that a trainer does is a step."""

log = logging.getLogger("gossamer.watching")


class Watching:
    """What is known of a daemon over time."""

    def __init__(self, view: NodeView) -> None:
        self._view = view
        self.on_look: Callable[[int], None] = lambda ticks: None
        """Called after every look, with how many there were before it."""
        self.chronicle = Chronicle(view.node_id, view.core.manifest)
        self.store = ChronicleStore(view.home.chronicle_path)
        """The chronicle's rounds, further back; for worker threads."""
        self.evaluations = Evaluations()
        self.notices = Notices()
        self.rates = Rates()
        self.vitals = Vitals()
        self.happenings = Happenings()
        self.disk_free: int | None = None
        """Bytes free for the node's folder or its chunks, whichever is less; None before the first look."""
        self._files_free: int | None = None
        self._folder_gone = False
        self._unwritable: Path | None = None
        self._lost_file: Path | None = None
        self._own_last = 0
        """Our last round before this run."""
        self._failed = False

    # -- called by the daemon

    async def restore(self) -> None:
        """Read back what an earlier run saved, and what the ledger holds beyond that."""
        self.notices.begin()
        self.chronicle.restore(*await asyncio.to_thread(self.store.load))
        self.evaluations.restore(await asyncio.to_thread(self.store.load_evaluations))
        self._own_last = self._view.core.own_last
        for delta in self._view.core.ledger:
            self.heard(delta)

    def heard(self, delta: Delta) -> None:
        """Note a record that is new here."""
        with self._contained():
            self.chronicle.heard(
                delta,
                unix_s=time.time(),
                clock=self._clock(delta.round),
                live=self._view.merging.ready,
                void=self._view.core.ledger.is_void(delta),
            )

    def merged(self, round_: int, deltas: tuple[Delta, ...], found: RoundFigures | None) -> None:
        """Note that a round was merged, or judged again: `Merging.on_judged`."""
        with self._contained():
            ledger, known = self._view.core.ledger, self.chronicle.at(round_)
            if round_ <= ledger.floor:
                return  # closed meanwhile: the ledger no longer knows whose deltas were valid
            valid = {delta.author for delta in ledger.valid(round_)}
            self.chronicle.merged(
                round_,
                deltas,
                void=[entry.author for entry in known.entries if entry.author not in valid] if known else (),
                figures=found.members if found else None,
                agreement=found.agreement if found else None,
                unix_s=time.time(),
                clock=self._clock(round_),
            )

    def _clock(self, round_: int) -> int:
        """The swarm's clock; `round_` while no members are known, as only records then tell where it is."""
        return self._view.core.clock or round_

    @contextmanager
    def _contained(self) -> Iterator[None]:
        """Inside, a fault is logged, once, and must not end the node."""
        try:
            yield
        except Exception as error:
            if isinstance(error, RuntimeError) and "start new thread" in str(error):
                return  # no fault of ours: the daemon meets the same error, and logs it in one line
            if not self._failed:
                log.exception("an error while watching this node; the node goes on")
            self._failed = True

    # -- as time goes by

    async def run(self) -> None:
        """Look every second until cancelled."""
        loop = asyncio.get_running_loop()
        ticks = 0
        while True:
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            with self._contained():
                await self._tick(ticks, loop.time() - due)
            ticks += 1

    async def _tick(self, ticks: int, late_s: float) -> None:
        if ticks % DISK_TICKS == 0:
            home = self._view.home
            self.disk_free, self._files_free = await asyncio.to_thread(_free_in, home)
            self._folder_gone = await asyncio.to_thread(home.lock.is_elsewhere)
            self._unwritable = await asyncio.to_thread(home.unwritable)
            self._lost_file = await asyncio.to_thread(home.lost_file)
        if ticks % SAVE_TICKS == 0:
            await self._save()
        self.settle()
        self.rates.look(self._view.links.values(), time.monotonic())
        self.vitals.look(self._look(late_s))
        core = self._view.core
        self.evaluations.look(self._view.report)
        self.happenings.look(core.roster.members(), core.sealing.claims)
        self.on_look(ticks)

    def settle(self) -> None:
        """Have the chronicle count the tokens of its rounds.

        Not before everything that was here at the start is merged, newest rounds first: until then sums are
        too small, and those of the last run are better.
        """
        merging = self._view.merging
        if merging.ready:
            self.chronicle.settle(merging.base.round, merging.base.tokens)

    def _look(self, late_s: float) -> Look:
        view, core = self._view, self._view.core
        live = core.roster.live()
        # When we are alone, the others are down as we see it. We dial those too, but not members that left.
        dialled = (member for member in core.roster.members() if member.health is not Health.LEFT)
        addresses = {address for member in dialled for address in member.record.body.addresses}
        return Look(
            now=time.monotonic(),
            late_s=late_s,
            links=len(view.links),
            dialled_by_others=view.links.dialled_by_others,
            addresses=core.own_record.addresses,
            lost_address=self._lost_address(),
            live=len(live),
            known=len(addresses.union(core.info.bootstrap)),
            behind=view.merging.behind,
            came=core.fetcher.came,
            missing=len(core.fetcher.wants),
            others_hold=core.fetcher.wants.any_has_holder,
            version=view.merging.version,
            diverged=view.merging.diverged,
            has_model=core.sealing.joined,
            is_ready=view.merging.ready,
            trains=core.info.trains,
            runs_out=runs_out_soon(core.acl.invited_until(view.node_id), time.time()) or "",
            refused=self._refusal(),
            disk_free=self.disk_free,
            files_free=self._files_free,
            folder_gone=str(view.home.root) if self._folder_gone else "",
            folder_read_only=str(self._unwritable or ""),
            file_lost=str(self._lost_file or ""),
            unstored=view.disk.problem,
            offsets=tuple(link.clock_offset_s for link in view.links.values()),
            outdone=core.presence.outdone,
            contradicted=core.is_contradicted,
            lacks_trainer=core.info.trains and not view.port.attached,
            overdue_s=self._overdue_s(),
            starts=view.port.attachments,
            void=sum(round_ > self._own_last for round_ in core.ledger.void_rounds(view.node_id)),
        )

    def _overdue_s(self) -> float:
        """How late the trainer's next step is, if there is a trainer that has a step to do."""
        port, state = self._view.port, self._view.state
        return port.pulse.overdue_s(time.monotonic()) if port.attached and state in STEPPING_STATES else 0.0

    def _refusal(self) -> str:
        """Why a member that knows what we know would refuse us; empty if it would let us in."""
        try:
            self._view.core.access.vet(self._view.node_id, b"", time.monotonic())
        except RefusedError as error:
            return str(error)
        return ""

    def _lost_address(self) -> str:
        """The address that this node listens on and dials from, if this machine no longer has it."""
        host = self._view.server.dials_from
        return host if host is not None and is_gone(host) else ""

    async def _save(self) -> None:
        """Save what has changed; what cannot be written is tried again with the next.

        So is what was about to be written when the node was stopped: its thread may not even have begun.
        """
        rounds, evaluations = self.chronicle.take_unsaved(), self.evaluations.take_unsaved()
        if not rounds and not evaluations:
            return
        try:
            await asyncio.to_thread(self.store.save, rounds, evaluations)
        except (StorageError, asyncio.CancelledError) as error:
            self.chronicle.not_saved(rounds)
            self.evaluations.not_saved(evaluations)
            if not isinstance(error, StorageError):
                raise
            log.debug("%s", error)

    async def close(self) -> None:
        """Save the rest, and stop."""
        self.notices.end()
        with self._contained():
            self.settle()
            await self._save()
            await asyncio.to_thread(self.store.close)

    # -- questions

    def health(self) -> tuple[bool, str]:
        """Whether the node is healthy, and its problem or its state."""
        if self.vitals.problem is not None:
            return False, self.vitals.problem
        state = self._view.state
        return state in HEALTHY_STATES, state


def _free_in(home: Home) -> tuple[int | None, int | None]:
    """Bytes and files that still fit into a node's folder; its chunks may be on another disk."""
    free, files = zip(*map(_free_at, (home.root, home.chunks_path)), strict=True)
    return _least(free), _least(files)


def _least(counts: Iterable[int | None]) -> int | None:
    return min((count for count in counts if count is not None), default=None)


def _free_at(path: Path) -> tuple[int | None, int | None]:
    """Bytes and files that still fit; None for what is not known or unbounded."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None, None
    return found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None
