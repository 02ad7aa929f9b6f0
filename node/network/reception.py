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
from gossamer.protocol import events as ev
from gossamer.protocol.envelope import Kind
from gossamer.protocol.errors import PeerError
from gossamer.protocol.limits import PAUSE_MAX_S
from gossamer.protocol.messages import Records, decode, encode


class Reception:
    """The transport's `Receiver`, for one daemon."""

    def __init__(
        self,
        links: OpenLinks,
        transfers: Transfers,
        own_addresses: OwnAddresses,
        policing: Policing,
        writer: RecordWriter,
        dispatch: Callable[[ev.Event], list[fx.Effect]],
        stopping: asyncio.Event,
    ) -> None:
        """Once `stopping` is set, the core is not told of links that end: it would dial others."""
        self._links = links
        self._transfers = transfers
        self._own_addresses = own_addresses
        self._policing = policing
        self._writer = writer
        self._dispatch = dispatch
        self._stopping = stopping
        self._is_stuck = False
        """Whether a link has waited in vain for the disk to take records."""

    def link_up(self, link: PeerLink) -> None:
        self._links.add(link)
        if link.outbound:
            self._transfers.begin(link)
        self._own_addresses.learn(link)
        self._dispatch(
            ev.LinkUp(link.number, link.node_id, link.outbound, link.address, link.credential, link.group)
        )

    def link_down(self, link: PeerLink) -> None:
        self._links.remove(link)
        self._transfers.gone(link.number)
        if not self._stopping.is_set():
            self._dispatch(ev.LinkDown(link.number))

    async def message(self, link: PeerLink, data: bytes) -> None:
        """Give a message to the core. Returns once the sender may go on, so that its next message is read."""
        size = len(data)
        begun = time.thread_time()
        if self._writer.has_room:
            self._is_stuck = False
        elif (rest := _without_deltas(data)) is not data:
            parsing_s = time.thread_time() - begun
            data = data if await self._finds_room(link) else rest
            begun = time.thread_time() - parsing_s
        effects = self._dispatch(ev.Received(link.number, data))
        fresh = sum(isinstance(effect, fx.Store) for effect in effects)
        pause = self._policing.heard(link, size, time.thread_time() - begun, fresh)
        if pause > 0.0:
            await link.rest(pause)

    async def _finds_room(self, link: PeerLink) -> bool:
        """Whether the disk takes deltas now or soon; if not, anti-entropy brings them later.

        Rows, pings and all other messages do not wait for the disk.
        """
        if not self._is_stuck:
            ends = [asyncio.ensure_future(end) for end in (self._writer.room(), link.ended())]
            try:
                await asyncio.wait(ends, timeout=PAUSE_MAX_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for end in ends:
                    end.cancel()
        self._is_stuck = not self._writer.has_room
        return not self._is_stuck


def _without_deltas(data: bytes) -> bytes:
    """A message without the deltas in it; the same bytes if there are none."""
    try:
        message = decode(data)
    except PeerError:
        return data  # the core says what is wrong with it
    if not isinstance(message, Records):
        return data
    others = tuple(entry for entry in message.entries if entry[0][0] != Kind.DELTA)
    return encode(Records(others)) if len(others) < len(message.entries) else data
