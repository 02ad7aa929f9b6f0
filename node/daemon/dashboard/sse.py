"""Server-sent events for any number of pages up to a bound: serialised once, sent to all.

https://html.spec.whatwg.org/multipage/server-sent-events.html. A listener first gets the state, the held-out
losses and the latest lines of the log, and then the state each second, and rounds and lines as they come.
"""

import asyncio
from collections.abc import Iterable
from typing import Any

from aiohttp import web

from gossamer.node.daemon.monitoring.monitor import Monitor
from gossamer.node.daemon.monitoring.round_history import dump, dump_rounds
from gossamer.node.daemon.monitoring.status import to_json
from gossamer.protocol.payloads import Layout

LISTENERS_MAX = 32
QUEUE_MAX = 30
"""How many events may wait for one listener: half a minute's worth. A slower listener is dropped."""

WRITE_TIMEOUT_S = 30.0


def event(name: str, data: Any) -> bytes:
    """One event with JSON data, which may be serialised already."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data if isinstance(data, bytes) else dump(data))


class Feed:
    """The listeners to one node's events."""

    def __init__(self, monitor: Monitor, layout: Layout) -> None:
        self._monitor = monitor
        self._layout = layout
        self._listeners: dict[asyncio.Queue[bytes], asyncio.Transport | None] = {}
        self._logged = 0
        """Number of the last log line that was sent."""

    def __len__(self) -> int:
        return len(self._listeners)

    async def run(self) -> None:
        """Send what is new after each look at the node, until cancelled; then drop all listeners."""
        try:
            while True:
                status = await self._monitor.next_look()
                changed = self._monitor.history.take_changed()
                lines = self._monitor.log.since(self._logged)
                self._logged = lines[-1].number if lines else self._logged
                if not self._listeners:
                    continue
                events = [event("notice", line.to_json()) for line in lines]
                if changed:
                    events.append(event("rounds", dump_rounds(changed, None, self._layout)))
                self.publish([*events, event("state", to_json(status))])
        finally:
            for queue in list(self._listeners):
                self._let_go(queue)

    def publish(self, events: Iterable[bytes]) -> None:
        """Queue events for all listeners; never waits."""
        data = b"".join(events)
        for queue in list(self._listeners):
            if queue.qsize() < QUEUE_MAX:
                queue.put_nowait(data)
            else:
                self._let_go(queue)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Answer a request with what is published from now on, until either side ends it."""
        if len(self._listeners) >= LISTENERS_MAX:
            raise web.HTTPServiceUnavailable(text="too many pages are open", headers={"Retry-After": "10"})
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._listeners[queue] = request.transport
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            lines = [line for line in self._monitor.log.since(0) if line.number <= self._logged]
            opening = [
                event("state", to_json(self._monitor.latest)),
                event("evaluations", self._monitor.history.losses_as_json()),
                *(event("notice", line.to_json()) for line in lines),
            ]
            data = b"".join(opening)
            while queue in self._listeners:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await response.write(data)
                data = await queue.get()
        except (OSError, TimeoutError):  # the page was closed, or takes nothing
            pass
        finally:
            self._let_go(queue)
        return response

    def _let_go(self, queue: asyncio.Queue[bytes]) -> None:
        """Close a listener's connection at once, whatever is still to be sent."""
        transport = self._listeners.pop(queue, None)
        if transport is not None:
            transport.abort()
        queue.put_nowait(b"")  # wakes `serve`, which may be waiting
