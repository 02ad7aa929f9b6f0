"""Serves the page with a recorded swarm, as the admin server would.

To look at it:   python -m tests.node.page_server --members 64 --rounds 10000 --every 2
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator

from aiohttp import web

from gossamer.node.daemon.dashboard import page
from tests.node.recorded_swarm import Recorded


class PageServer:
    """The server. `publish` sends an event to every open page; `drop` ends their streams, as a dying node
    would."""

    def __init__(self, swarm: Recorded) -> None:
        self.swarm = swarm
        self.refuse = False
        """Whether it answers every request with an error."""
        self.asked: list[str] = []
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self.app = web.Application(middlewares=[self._watch])
        self.app.router.add_get("/", self._page)
        self.app.router.add_get("/api/state", self._state)
        self.app.router.add_get("/api/rounds", self._rounds)
        self.app.router.add_get("/api/events", self._events)

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        """The server's URL while it runs."""
        runner = web.AppRunner(self.app, access_log=None, shutdown_timeout=1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        beating = asyncio.create_task(self._beat())
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
        finally:
            beating.cancel()
            self.drop()
            await runner.cleanup()

    async def _beat(self) -> None:
        """Send the state each second: a page that hears nothing for a while considers the node lost."""
        while True:
            await asyncio.sleep(1)
            self.publish("state", self.swarm.snapshot())

    def publish(self, event: str, data: object) -> None:
        frame = f"event: {event}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
        for queue in self._queues:
            queue.put_nowait(frame)

    def step(self) -> None:
        """Publish one more round, and the state after it."""
        self.publish("rounds", self.swarm.step())
        self.publish("state", self.swarm.snapshot())

    def drop(self) -> None:
        for queue in self._queues:
            queue.put_nowait(None)

    @web.middleware
    async def _watch(self, request: web.Request, handler: web.RequestHandler) -> web.StreamResponse:
        self.asked.append(request.path_qs)
        if self.refuse:
            raise web.HTTPServiceUnavailable
        return await handler(request)

    async def _page(self, _: web.Request) -> web.Response:
        headers = {"Content-Security-Policy": page.policy(), "X-Content-Type-Options": "nosniff"}
        return web.Response(text=page.document(), content_type="text/html", headers=headers)

    async def _state(self, _: web.Request) -> web.Response:
        return web.json_response(self.swarm.snapshot())

    async def _rounds(self, request: web.Request) -> web.Response:
        first, last = int(request.query.get("from", "0")), int(request.query.get("to", "2147483647"))
        told = json.dumps(self.swarm.rounds_between(first, last), separators=(",", ":"))
        response = web.Response(text=told, content_type="application/json", zlib_executor_size=1 << 16)
        response.enable_compression()
        return response

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        await response.prepare(request)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._queues.add(queue)
        try:
            self._greet(queue)
            while (frame := await queue.get()) is not None:
                await response.write(frame)
        except ConnectionError:
            pass  # the page was closed
        finally:
            self._queues.discard(queue)
        return response

    def _greet(self, queue: asyncio.Queue[bytes | None]) -> None:
        first = [("state", self.swarm.snapshot()), ("evaluations", self.swarm.evaluations())]
        first += [("notice", notice) for notice in self.swarm.notices()]
        for event, data in first:
            queue.put_nowait(f"event: {event}\ndata: {json.dumps(data)}\n\n".encode())


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--every", type=float, default=2.0, help="seconds a round")
    parser.add_argument("--port", type=int, default=7780)
    options = parser.parse_args()
    server = PageServer(Recorded(options.members, options.rounds, now=time.time()))
    async with server.serving(options.port) as url:
        print(url)
        while True:
            await asyncio.sleep(options.every)
            server.step()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_main())
