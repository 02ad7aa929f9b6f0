"""Carries out the transfers of chunks that the core has scheduled: `Get`, `Put`, and `Ask`."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp

from gossamer.node.network.chunk_requests import get_chunk, put_chunk
from gossamer.node.network.link import PeerLink
from gossamer.node.network.policing import Policing
from gossamer.node.network.receiver import Chunks
from gossamer.node.network.uplink import BusyError
from gossamer.node.network.uploads import Uploads
from gossamer.node.storage.chunkstore import MissingChunkError
from gossamer.protocol import effects as fx
from gossamer.protocol.errors import PayloadError, PeerError
from gossamer.protocol.identity import short
from gossamer.protocol.limits import ASKS_PER_LINK_MAX, PUTS_PER_LINK_MAX, SMALL_CHUNK_BYTES
from gossamer.protocol.messages import Ask, Decline, encode
from gossamer.protocol.offence import Offence

_Asked = tuple[bytes, int]
"""A chunk's hash, and the number of its upload."""

log = logging.getLogger("gossamer.transfers")


class Transfers:
    """Gets chunks from peers that we dialled, and puts chunks to those of them that asked. Over each link
    chunks are put one after another as there is room on the line, the next one while the answer to the one
    before is on its way."""

    def __init__(
        self,
        chunks: Chunks,
        uploads: Uploads,
        policing: Policing,
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._chunks = chunks
        self._uploads = uploads
        self._policing = policing
        self._spawn = spawn
        self._asked: dict[int, asyncio.Queue[_Asked]] = {}
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._getting: dict[int, set[asyncio.Task[None] | None]] = {}
        """The tasks that get chunks, for each link that is up."""

    async def get(self, link: PeerLink, effect: fx.Get) -> None:
        """Fetch one chunk, unless it could not be kept, and report the outcome to the core.

        The fetch ends with the link. Otherwise a peer that never answers and links to us again and again
        could take up all connections.
        """
        getting, task = self._getting.get(link.number), asyncio.current_task()
        if getting is not None:
            getting.add(task)
            try:
                data = await self._get(link, effect) if await self._chunks.can_keep() else None
            finally:
                getting.discard(task)
            if data is not None:  # from here on the end of the link makes no difference
                await self._chunks.chunk_arrived(effect.blob, data)
        self._chunks.chunk_failed(link, effect.blob)

    async def _get(self, link: PeerLink, effect: fx.Get) -> bytes | None:
        """A chunk from a peer, None if it does not come."""
        try:
            async with asyncio.timeout(effect.patience):
                return await get_chunk(link, effect.blob, effect.size)
        except PayloadError as error:
            self._policing.blame(link.node_id, str(error), Offence.CHUNK)
        except PeerError as error:
            log.debug("%s", error)
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            log.debug("fetching from %s: %s", short(link.node_id), error)
        return None

    async def ask(self, link: PeerLink, question: Ask) -> None:
        """Have a peer that dialled us put a chunk, unless it could not be kept."""
        if await self._chunks.can_keep():
            link.send(encode(question))
        else:
            self._chunks.chunk_failed(link, question.blob)

    def begin(self, link: PeerLink) -> None:
        """From now on, get chunks from a peer that we dialled, and put to it what it asks for."""
        self._getting[link.number] = set()
        self._asked[link.number] = asyncio.Queue(ASKS_PER_LINK_MAX)
        self._serving[link.number] = self._spawn(self._serve(link, self._asked[link.number]))

    def end(self, number: int) -> None:
        """Stop putting the chunks that a link's peer asked for."""
        self._asked.pop(number, None)
        serving = self._serving.pop(number, None)
        if serving is not None:
            serving.cancel()

    def gone(self, number: int) -> None:
        """A link has ended: stop getting chunks over it as well."""
        self.end(number)
        for task in self._getting.pop(number, ()):
            if task is not None:
                task.cancel()

    def asked(self, link: PeerLink, blob: bytes) -> None:
        """A peer that we dialled asks for a chunk: queue it, or decline."""
        queue = self._asked.get(link.number)
        upload = None if queue is None or queue.full() else self._uploads.begin(link.node_id, blob)
        if queue is None or upload is None:
            link.send(encode(Decline(blob)))
        else:
            queue.put_nowait((blob, upload))

    async def _serve(self, link: PeerLink, asked: asyncio.Queue[_Asked]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(PUTS_PER_LINK_MAX):
                group.create_task(self._serve_each(link, asked))

    async def _serve_each(self, link: PeerLink, asked: asyncio.Queue[_Asked]) -> None:
        while True:
            blob, upload = await asked.get()
            try:
                sent = await self._put(link, blob)
            finally:
                self._uploads.end(upload)
            if sent < SMALL_CHUNK_BYTES:
                await asyncio.sleep(self._policing.gave_little(link.node_id))

    async def _put(self, link: PeerLink, blob: bytes) -> int:
        """Send a chunk, or decline; returns the number of bytes sent."""
        chunk = None
        try:
            if not self._chunks.holds(blob):
                raise MissingChunkError(blob)
            turn = await self._uploads.uplink.turn(link)
            try:
                chunk = await self._chunks.read_chunk(blob)
                if chunk is None:
                    raise MissingChunkError(blob)
                await put_chunk(link, blob, chunk, turn)
            finally:
                turn.end()
        except (BusyError, PeerError, MissingChunkError, OSError, TimeoutError, aiohttp.ClientError) as error:
            log.debug("sending to %s: %s", short(link.node_id), error)
            link.send(encode(Decline(blob)))
        return len(chunk.as_it_travels) if chunk else 0
