"""Watches the daemon from inside: the chronicle, the notices, the vitals, and the pages that show them.

Nothing that the node does for the swarm depends on it, and a fault in here is logged and passed over.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gossamer.node.dashboard import feed
from gossamer.node.dashboard.admin_state import admin_state
from gossamer.node.monitoring.chronicle import Chronicle, Round, as_json
from gossamer.node.monitoring.chroniclestore import ChronicleStore
from gossamer.node.monitoring.evaluations import Evaluations
from gossamer.node.monitoring.happenings import Happenings
from gossamer.node.monitoring.notices import Notices
from gossamer.node.monitoring.rates import Rates
from gossamer.node.monitoring.status import state_of
from gossamer.node.monitoring.vitals import Look, Vitals
from gossamer.node.network.link import PeerLink
from gossamer.protocol.conduct import RoundFigures
from gossamer.protocol.errors import StorageError
from gossamer.protocol.records import Delta

if TYPE_CHECKING:
    from gossamer.node.daemon import Daemon

TICK_S = 1.0
SAVE_TICKS = 5
"""A node that is killed forgets what was chronicled in this many seconds; records are not touched by that."""

DISK_TICKS = 10
HEARTBEAT_TICKS = 15

HEALTHY_STATES = frozenset({"starting", "training", "serving", "finished"})

log = logging.getLogger("gossamer.watching")


class Watching:
    """What is known of a daemon over time."""

    def __init__(self, daemon: "Daemon") -> None:
        self._daemon = daemon
        self.chronicle = Chronicle(daemon.identity.node_id, len(daemon.core.layout.fragments))
        self.evaluations = Evaluations()
        self.notices = Notices()
        self.rates = Rates()
        self.vitals = Vitals()
        self.happenings = Happenings()
        self.feed = feed.Feed()
        self.disk_free: int | None = None
        """Bytes free where the node's folder is; None before the first look."""
        self._folder_gone = False
        self._store = ChronicleStore(daemon.home.chronicle_path)
        self._was_dialled = False
        self._own_last = 0
        """Our last round before this run."""
        self._noticed = 0
        self._state: tuple[float, bytes] | None = None
        self._failed = False
        self._telling = asyncio.Lock()
        """A thousand rounds of 64 members take 0.4 s to serialise: not for several at once."""
        daemon.merging.on_judged = self._merged

    # -- the daemon tells

    async def restore(self) -> None:
        """Read back what an earlier run kept, and what the ledger holds beyond that."""
        self.notices.begin()
        self.chronicle.restore(*await asyncio.to_thread(self._store.load))
        self.evaluations.restore(await asyncio.to_thread(self._store.load_evaluations))
        self._own_last = self._daemon.core.own_last
        for delta in self._daemon.core.ledger:
            self.heard(delta)

    def heard(self, delta: Delta) -> None:
        """A record is new here."""
        daemon = self._daemon
        with self._contained():
            self.chronicle.heard(
                delta,
                unix_s=time.time(),
                clock=self._clock(delta.round),
                live=daemon.merging.ready,
                void=daemon.core.ledger.is_void(delta),
            )

    def link_up(self, link: PeerLink) -> None:
        self._was_dialled |= not link.outbound

    def _merged(self, round_: int, deltas: tuple[Delta, ...], found: RoundFigures | None) -> None:
        with self._contained():
            ledger, known = self._daemon.core.ledger, self.chronicle.at(round_)
            if round_ <= ledger.floor:
                return  # closed meanwhile: the ledger does not tell any more who was valid
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
        """Until we know members, the records alone tell where the swarm is."""
        return self._daemon.core.clock or round_

    @contextmanager
    def _contained(self) -> Iterator[None]:
        """A fault in here is said once: the node has better things to do than to end of it."""
        try:
            yield
        except Exception:
            if not self._failed:
                log.exception("a fault in watching this node; it goes on")
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
            self.disk_free = await asyncio.to_thread(_free_at, str(self._daemon.home.root))
            self._folder_gone = await asyncio.to_thread(self._daemon.home.is_gone)
        if ticks % SAVE_TICKS == 0:
            await self._save()
        self._settle()
        self.rates.look(self._daemon.links.values(), time.monotonic())
        self.vitals.look(self._look(late_s))
        core = self._daemon.core
        self.evaluations.look(self._daemon.port.report, core.own_last)
        self.happenings.look(core.roster.members(), core.sealing.claims)
        self._publish(ticks)

    def _settle(self) -> None:
        base = self._daemon.merging.base
        self.chronicle.settle(base.round, base.tokens)

    def _look(self, late_s: float) -> Look:
        daemon, core = self._daemon, self._daemon.core
        live, own = core.roster.live(), daemon.identity.node_id
        addresses = {address for member in live for address in member.peer.body.addresses}
        return Look(
            now=time.monotonic(),
            late_s=late_s,
            links=len(daemon.links),
            was_dialled=self._was_dialled,
            addresses=core.own_row.addresses,
            live=len(live),
            known=len(addresses.union(core.info.bootstrap)),
            behind=daemon.merging.behind,
            version=daemon.merging.version,
            disk_free=self.disk_free,
            folder_gone=str(daemon.home.root) if self._folder_gone else "",
            offsets=tuple(link.clock_offset_s for link in daemon.links.values()),
            lacks_trainer=core.info.trains and not daemon.port.attached,
            void=sum(d.round > self._own_last and core.ledger.is_void(d) for d in core.ledger.by(own)),
        )

    def _publish(self, ticks: int) -> None:
        """Tell those who listen what is new; serialised once for all of them."""
        changed = self.chronicle.take_changed()
        notices = self.notices.since(self._noticed)
        self._noticed = notices[-1].number if notices else self._noticed
        if not len(self.feed):
            return
        events = [feed.event("notice", notice.to_json()) for notice in notices]
        if changed:
            events.append(feed.event("rounds", as_json(changed)))
        events.append(feed.event_of("state", self.state()))
        if ticks % HEARTBEAT_TICKS == 0:
            events.append(feed.HEARTBEAT)
        self.feed.publish(events)

    async def _save(self) -> None:
        """Write down what has changed; what cannot be written is tried again with the next."""
        rounds, evaluations = self.chronicle.take_unsaved(), self.evaluations.take_unsaved()
        if not rounds and not evaluations:
            return
        try:
            await asyncio.to_thread(self._store.save, rounds, evaluations)
        except StorageError as error:
            self.chronicle.not_saved(rounds)
            self.evaluations.not_saved(evaluations)
            log.debug("%s", error)

    async def close(self) -> None:
        """Write down the rest and let everybody go."""
        self.feed.close()
        self.notices.end()
        with self._contained():
            self._settle()
            await self._save()
            await asyncio.to_thread(self._store.close)

    # -- what is asked

    def health(self) -> tuple[bool, str]:
        """Whether the node does what it is for, and why or why not."""
        state = state_of(self._daemon)
        if self.vitals.problem is not None:
            return False, self.vitals.problem
        return state in HEALTHY_STATES, state

    def state(self) -> bytes:
        """The state as JSON, not older than half a tick, however many ask."""
        now = time.monotonic()
        if self._state is None or now - self._state[0] > TICK_S / 2:
            self._state = (now, feed.to_json(admin_state(self._daemon)))
        return self._state[1]

    def opening(self) -> list[bytes]:
        """What a new listener is told first."""
        notices = [notice for notice in self.notices.since(0) if notice.number <= self._noticed]
        return [
            feed.event_of("state", self.state()),
            feed.event("evaluations", self.evaluations.to_json()),
            *(feed.event("notice", notice.to_json()) for notice in notices),
        ]

    async def rounds(self, first: int, last: int) -> bytes:
        """The rounds kept from one to another, as JSON, and the oldest kept of all.

        What is no longer in memory comes from the disk. In a thread, since they may be many.
        """
        self._settle()
        async with self._telling:
            kept = [row for row in self.chronicle.since(first) if row.number <= last]
            oldest = self.chronicle.oldest()
            return await asyncio.to_thread(
                self._told, kept, oldest, first, min(last, self.chronicle.begins_after)
            )

    def _told(self, kept: list[Round], oldest: int | None, first: int, stored_last: int) -> bytes:
        older = self._store.between(first, stored_last) if first <= stored_last else []
        begins = [number for number in (oldest, self._store.oldest()) if number is not None]
        return _serialised([*older, *kept], min(begins, default=None))


def _serialised(rounds: list[Round], oldest: int | None) -> bytes:
    """Line by line: one call for all would not let go of the interpreter, which the event loop needs, too."""
    told = as_json(rounds)
    authors, lines = feed.to_json(told["authors"]), b",".join(map(feed.to_json, told["rounds"]))
    return b'{"oldest":%b,"authors":%b,"rounds":[%b]}' % (feed.to_json(oldest), authors, lines)


def _free_at(path: str) -> int | None:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return None
