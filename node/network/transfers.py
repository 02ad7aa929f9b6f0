"""Carries out chunk transfers that the core has scheduled, and puts what arrives on disk."""

import asyncio
import logging
from collections.abc import Callable

import aiohttp

from gossamer.node.network.link import PeerLink
from gossamer.node.network.transport import Transport
from gossamer.node.network.uploads import Uploads
from gossamer.node.storage.chunkstore import ChunkStore, MissingChunkError
from gossamer.protocol import effects as fx
from gossamer.protocol.errors import PayloadError, PeerError
from gossamer.protocol.greylist import Offence
from gossamer.protocol.identity import short
from gossamer.protocol.limits import ASKS_PER_LINK_MAX, PUTS_PER_LINK_MAX
from gossamer.protocol.messages import Decline, encode

DISK_RETRY_S = 5.0

log = logging.getLogger("gossamer.transfers")


class Transfers:
    """Gets chunks from peers we dialled, puts them to those who asked, two at a time per link."""

    def __init__(
        self,
        chunks: ChunkStore,
        transport: Transport,
        dispatch: Callable[[fx.Event], object],
        on_damaged: Callable[[bytes], None],
        blame: Callable[[bytes, str, Offence], None],
        uploads: Uploads,
    ) -> None:
        self._chunks = chunks
        self._transport = transport
        self._dispatch = dispatch
        self._on_damaged = on_damaged
        self._blame = blame
        self._uploads = uploads
        self._asked: dict[int, asyncio.Queue[bytes]] = {}

    async def get(self, link: PeerLink, effect: fx.Get) -> None:
        """Fetch one chunk and report the outcome to the core."""
        try:
            data = await self._transport.get_chunk(link, effect.blob, effect.size)
            await self.store(effect.blob, data)
        except PayloadError as error:
            self._blame(link.node_id, str(error), Offence.CHUNK)
        except PeerError as error:
            log.debug("%s", error)
        except (OSError, TimeoutError, aiohttp.ClientError) as error:
            log.debug("fetching from %s: %s", short(link.node_id), error)
        self._dispatch(fx.ChunkFailed(effect.link, effect.blob))

    async def store(self, blob: bytes, data: bytes) -> bool:
        """Keep a chunk that we wanted, whose hash holds. Returns whether it is; else it is fetched again."""
        try:
            await asyncio.to_thread(self._chunks.put, blob, data)
        except OSError as error:
            log.error("cannot store a payload: %s; free some space, it will be fetched again", error.strerror)
            await asyncio.sleep(DISK_RETRY_S)
            return False
        self._dispatch(fx.ChunkArrived(blob))
        return True

    async def read(self, blob: bytes) -> bytes | None:
        """A chunk from disk, None if it is not here."""
        if blob not in self._chunks:
            return None
        try:
            return await asyncio.to_thread(self._chunks.get, blob)
        except MissingChunkError:
            self._on_damaged(blob)
            return None

    def asked(self, link: PeerLink, blob: bytes) -> None:
        """A peer that we dialled asks for a chunk: queue it, or decline."""
        queue = self._asked.get(link.number)
        if queue is None or queue.full() or not self._uploads.begin(link.node_id, blob):
            link.send(encode(Decline(blob)))
        else:
            queue.put_nowait(blob)

    async def serve_asked(self, link: PeerLink) -> None:
        """Put to a link's peer what it asks for, until cancelled."""
        queue = self._asked[link.number] = asyncio.Queue(ASKS_PER_LINK_MAX)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(PUTS_PER_LINK_MAX):
                    group.create_task(self._serve(link, queue))
        finally:
            del self._asked[link.number]

    async def _serve(self, link: PeerLink, queue: asyncio.Queue[bytes]) -> None:
        while True:
            blob = await queue.get()
            try:
                await self._put(link, blob)
            finally:
                self._uploads.end()

    async def _put(self, link: PeerLink, blob: bytes) -> None:
        data = await self.read(blob)
        try:
            if data is None:
                raise MissingChunkError(blob)
            await self._transport.put_chunk(link, blob, data)
        except (PeerError, MissingChunkError, OSError, TimeoutError, aiohttp.ClientError) as error:
            log.debug("sending to %s: %s", short(link.node_id), error)
            link.send(encode(Decline(blob)))
