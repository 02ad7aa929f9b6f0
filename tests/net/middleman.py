"""A man in the middle: ends TLS with a certificate of its own, reads everything, and passes it on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from gossamer.node.address import parse_address
from gossamer.node.daemon.network.sockets import client_context
from tests.node.wires import fresh_certificate

PIECE_BYTES = 16 * 1024


class Middleman:
    """The bytes that passed through a `middleman`, in the clear."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.address = ""
        self.connections = 0
        """TLS connections that its victims completed."""
        self.asked = b""
        """All bytes from the dialling side."""
        self.answered = b""
        """All bytes from the node behind it."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        host, port = parse_address(self.target)
        back, onward = await asyncio.open_connection(host, port, ssl=client_context(), server_hostname="")
        try:
            async with asyncio.TaskGroup() as ways:
                ways.create_task(self._pump(reader, onward, "asked"))
                ways.create_task(self._pump(back, writer, "answered"))
        except* OSError:
            pass
        finally:
            writer.transport.abort()
            onward.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: str) -> None:
        while data := await reader.read(PIECE_BYTES):
            setattr(self, kept, getattr(self, kept) + data)
            writer.write(data)
            await writer.drain()
        writer.transport.abort()


@contextlib.asynccontextmanager
async def middleman(target: str) -> AsyncIterator[Middleman]:
    """Listen in front of a node while the block runs."""
    man = Middleman(target)
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(man.serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=fresh_certificate().context)
    man.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield man
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
