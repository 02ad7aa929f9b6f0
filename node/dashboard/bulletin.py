"""What clients that watch a node are told: its state and its rounds, when asked and as they change."""

import asyncio
import time

from gossamer.node.dashboard import feed
from gossamer.node.dashboard.admin_state import admin_state
from gossamer.node.monitoring.rounds import Round, as_json, at_most, line_of
from gossamer.node.monitoring.view import NodeView
from gossamer.node.monitoring.watching import TICK_S, Watching

HEARTBEAT_TICKS = 15

TOLD_ROUNDS_MAX = 512
TOLD_ENTRIES_MAX = 32_768
"""Limits of one answer: 512 rounds of 64 members, about 1 MB of JSON. A page asks again for older ones."""


class Bulletin:
    """Serialises news once for all listeners, and answers to questions no more often than needed."""

    def __init__(self, view: NodeView, watching: Watching) -> None:
        self._view = view
        self._watching = watching
        self.feed = feed.Feed()
        self._noticed = 0
        self._state: tuple[float, bytes] | None = None
        self._telling = asyncio.Lock()
        """A full answer takes 0.2 s to serialise, so only one is serialised at a time."""

    def publish(self, ticks: int) -> None:
        """Tell the listeners what is new. Called after every look of `Watching`."""
        changed = self._watching.chronicle.take_changed()
        notices = self._watching.notices.since(self._noticed)
        self._noticed = notices[-1].number if notices else self._noticed
        if not len(self.feed):
            return
        events = [feed.event("notice", notice.to_json()) for notice in notices]
        if changed:
            events.append(feed.event("rounds", as_json(changed, self._view.core.layout)))
        events.append(feed.event_of("state", self.state()))
        if ticks % HEARTBEAT_TICKS == 0:
            events.append(feed.HEARTBEAT)
        self.feed.publish(events)

    def opening(self) -> list[bytes]:
        """What a new listener is told first."""
        notices = [notice for notice in self._watching.notices.since(0) if notice.number <= self._noticed]
        return [
            feed.event_of("state", self.state()),
            feed.event("evaluations", self._watching.evaluations.to_json()),
            *(feed.event("notice", notice.to_json()) for notice in notices),
        ]

    def state(self) -> bytes:
        """The state as JSON, at most half a tick old, however many ask."""
        now = time.monotonic()
        if self._state is None or now - self._state[0] > TICK_S / 2:
            self._state = (now, feed.to_json(admin_state(self._view, self._watching)))
        return self._state[1]

    async def rounds(self, first: int, last: int) -> bytes:
        """The newest rounds kept from `first` to `last`, and the number of the oldest kept of all, as JSON.

        Rounds that are no longer in memory come from disk. Done in a thread, since they may be many.
        """
        self._watching.settle()
        chronicle = self._watching.chronicle
        async with self._telling:
            kept = list(at_most(chronicle.newest_first(first, last), TOLD_ROUNDS_MAX, TOLD_ENTRIES_MAX))
            return await asyncio.to_thread(
                self._told, kept, chronicle.oldest(), first, min(last, chronicle.begins_after)
            )

    def _told(self, newest: list[Round], oldest: int | None, first: int, stored_last: int) -> bytes:
        store = self._watching.store
        rounds_left = TOLD_ROUNDS_MAX - len(newest)
        entries_left = TOLD_ENTRIES_MAX - sum(len(row.entries) for row in newest)
        if first <= stored_last and rounds_left > 0 and entries_left > 0:
            newest = [*newest, *store.between(first, stored_last, rounds_left, entries_left)]
        begins = [number for number in (oldest, store.oldest()) if number is not None]
        return self._serialised(newest[::-1], min(begins, default=None))

    def _serialised(self, rounds: list[Round], oldest: int | None) -> bytes:
        """Rounds as JSON, serialised line by line, with no line's objects kept. A single call for all of them
        would hold the interpreter lock, which the event loop needs too, and so would the garbage collection
        of everything made for it.
        """
        layout, places = self._view.core.layout, dict[bytes, int]()
        lines = b",".join([feed.to_json(line_of(row, layout, places)) for row in rounds])
        authors = feed.to_json([author.hex() for author in places])
        return b'{"oldest":%b,"authors":%b,"rounds":[%b]}' % (feed.to_json(oldest), authors, lines)
