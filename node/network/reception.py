"""Links come up and go down, and the messages that they carry go to the core."""

import asyncio
import time
from collections.abc import Callable

from gossamer.node.network.link import PeerLink
from gossamer.node.network.open_links import OpenLinks
from gossamer.node.network.own_addresses import OwnAddresses
from gossamer.node.network.policing import Policing
from gossamer.node.network.transfers import Transfers
from gossamer.node.storage.recordwriter import RecordWriter
from gossamer.protocol import effects as fx


class Reception:
    """The transport's `Receiver`, for one daemon."""

    def __init__(
        self,
        links: OpenLinks,
        transfers: Transfers,
        own_addresses: OwnAddresses,
        policing: Policing,
        writer: RecordWriter,
        dispatch: Callable[[fx.Event], list[fx.Effect]],
        stopping: asyncio.Event,
    ) -> None:
        """Once `stopping` is set, the core hears no more of links that end: it would dial others."""
        self._links = links
        self._transfers = transfers
        self._own_addresses = own_addresses
        self._policing = policing
        self._writer = writer
        self._dispatch = dispatch
        self._stopping = stopping

    def link_up(self, link: PeerLink) -> None:
        self._links.add(link)
        if link.outbound:
            self._transfers.begin(link)
        self._own_addresses.learn(link)
        self._dispatch(
            fx.LinkUp(link.number, link.node_id, link.outbound, link.address, link.credential, link.group)
        )

    def link_down(self, link: PeerLink) -> None:
        self._links.remove(link)
        self._transfers.end(link.number)
        if not self._stopping.is_set():
            self._dispatch(fx.LinkDown(link.number))

    async def message(self, link: PeerLink, data: bytes) -> None:
        """Give it to the core. Returns, so that the next may be read, once its sender may go on."""
        begun = time.thread_time()
        effects = self._dispatch(fx.Received(link.number, data))
        fresh = sum(isinstance(effect, fx.Store) for effect in effects)
        pause = self._policing.heard(link, len(data), time.thread_time() - begun, fresh)
        await self._writer.room()
        if pause > 0.0:
            await link.rest(pause)
