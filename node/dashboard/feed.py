"""Server-sent events for any number of pages up to a bound: serialised once, sent to all.

https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

import asyncio
import json
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

LISTENERS_MAX = 32
QUEUE_MAX = 30
"""How many events may wait for one listener: half a minute's worth. A slower listener is dropped."""

SEND_BUFFER_BYTES = 1 << 16
"""How much the system buffers for a page that reads nothing. By itself it would buffer megabytes, which take
many minutes to fill while such a page keeps its place."""

WRITE_TIMEOUT_S = 30.0


def event(name: str, data: Any) -> bytes:
    """One event with JSON data."""
    return event_of(name, to_json(data))


def event_of(name: str, data: bytes) -> bytes:
    """One event with data that is serialised already."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def to_json(data: Any) -> bytes:
    """Compact JSON, ASCII, in one line. Raises ValueError for what JSON cannot express, such as infinity."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()


HEARTBEAT = b": still here\n\n"


@dataclass(eq=False, slots=True)
class _Listener:
    transport: asyncio.Transport | None
    queue: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)

    def __post_init__(self) -> None:
        line = None if self.transport is None else self.transport.get_extra_info("socket")
        if line is not None:
            with suppress(OSError):  # from macOS, for a page that has been closed already
                line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)

    def cut(self) -> None:
        """Close its connection at once, whatever is still to be sent."""
        if self.transport is not None:
            self.transport.abort()


class Feed:
    """The listeners to one node's events."""

    def __init__(self) -> None:
        self._listeners: set[_Listener] = set()

    def __len__(self) -> int:
        return len(self._listeners)

    def publish(self, events: Iterable[bytes]) -> None:
        """Queue events for all listeners; never waits."""
        data = b"".join(events)
        for listener in list(self._listeners) if data else ():
            if listener.queue.qsize() < QUEUE_MAX:
                listener.queue.put_nowait(data)
            else:
                self._let_go(listener)

    async def serve(
        self, request: web.Request, opening: Iterable[bytes], headers: Mapping[str, str]
    ) -> web.StreamResponse:
        """Answer a request with `opening` and what is published from now on, until either side ends it."""
        if len(self._listeners) >= LISTENERS_MAX:
            raise web.HTTPServiceUnavailable(text="too many pages are open", headers={"Retry-After": "10"})
        listener = _Listener(request.transport)
        self._listeners.add(listener)
        response = web.StreamResponse(headers={**headers, "Content-Type": "text/event-stream"})
        try:
            await response.prepare(request)
            data = b"".join(opening)
            while listener in self._listeners:
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await response.write(data)
                data = await listener.queue.get()
        except (OSError, TimeoutError):  # the page was closed, or takes nothing
            pass
        finally:
            self._let_go(listener)
        return response

    def _let_go(self, listener: _Listener) -> None:
        self._listeners.discard(listener)
        listener.cut()
        listener.queue.put_nowait(b"")  # wakes `serve`, which may be waiting

    def close(self) -> None:
        """Drop all listeners."""
        for listener in list(self._listeners):
            self._let_go(listener)
