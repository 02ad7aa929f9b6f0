"""`reception`: what the core hears; a disk that takes no records keeps deltas out, and nothing else."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gossamer.node.daemon.network import server as reception_module
from gossamer.node.daemon.network.links import LinkTable, PeerLink
from gossamer.node.daemon.network.peer_scores import PeerScores
from gossamer.node.daemon.network.server import Reception
from gossamer.node.daemon.storage import records as recordwriter
from gossamer.node.daemon.storage.records import RecordWriter
from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.messages import Message, Ping, Records, decode, encode
from gossamer.protocol.records import HEADER_BYTES, RecordKind
from tests.node.trainer_side import until
from tests.node.wires import End, linked, listening
from tests.protocol.builders import unsigned

DELTA = (bytes([RecordKind.DELTA]) + bytes(HEADER_BYTES), True)
ROW = (bytes([RecordKind.MEMBER]) + bytes(HEADER_BYTES), False)


class Full:
    """A reception whose disk takes nothing, and what its core was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(recordwriter, "BACKLOG_MAX", 0)
        nothing = cast("object", None)
        self.writer = RecordWriter(nothing, nothing, nothing)  # type: ignore[arg-type]
        self.writer.add(unsigned(1, 1), own=False)
        self.told: list[Message] = []
        self.reception = Reception(
            nothing,  # type: ignore[arg-type]
            nothing,  # type: ignore[arg-type]
            nothing,  # type: ignore[arg-type]
            PeerScores(),
            self.writer,
            self._dispatch,
            asyncio.Event(),
        )

    def _dispatch(self, event: ev.Event) -> list[fx.Effect]:
        assert isinstance(event, ev.Received)
        self.told.append(decode(event.data))
        return []

    async def message(self, link: PeerLink, message: Message) -> None:
        await self.reception.message(link, encode(message))


def test_each_message_goes_as_what_it_is() -> None:
    links, sent = LinkTable(), []
    links.add(cast(PeerLink, SimpleNamespace(number=7, outbound=True, send=sent.append)))
    first, second = Ping(1), Ping(2)
    for message in (first, first, second, Ping(1)):
        links.send(7, message)
    links.send(8, first)
    assert sent == [encode(message) for message in (first, first, second, first)]


async def test_once_a_node_is_stopping_its_core_hears_no_more_of_links_that_end() -> None:
    """It would dial others."""
    dialler, listener = End(1), End(2)
    nothing: Any = None
    transfers: Any = SimpleNamespace(gone=lambda number: None)
    told: list[ev.Event] = []
    stopping = asyncio.Event()

    def dispatch(event: ev.Event) -> list[fx.Effect]:
        told.append(event)
        return []

    reception = Reception(LinkTable(), transfers, nothing, PeerScores(), nothing, dispatch, stopping)
    async with listening(dialler, listener):
        out, inward = await linked(dialler, listener)
        reception.link_down(out)
        stopping.set()
        reception.link_down(inward)
    assert told == [ev.LinkDown(out.number)]


async def test_where_the_disk_takes_no_records_all_else_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    dialler, listener = End(1), End(2)
    async with listening(dialler, listener):
        _, link = await linked(dialler, listener)
        full = Full(monkeypatch)
        for message in (Ping(1), Records((ROW,))):
            await full.message(link, message)
        assert full.told == [Ping(1), Records((ROW,))], "without a wait"
        waits = asyncio.create_task(full.message(link, Records((DELTA,))))
        await asyncio.sleep(0.01)
        assert not waits.done() and len(full.told) == 2
        full.writer._has_room.set()
        await waits
        assert full.told[2:] == [Records((DELTA,))], "the disk has caught up"
        full.writer._has_room.clear()
        monkeypatch.setattr(reception_module, "PAUSE_MAX_S", 0.01)
        await full.message(link, Records((DELTA, ROW)))
        assert full.told[3:] == [Records((ROW,))], "the delta comes again"
        monkeypatch.setattr(reception_module, "PAUSE_MAX_S", 3600.0)
        await asyncio.wait_for(full.message(link, Records((DELTA,))), 5)
        assert full.told[4:] == [Records(())], "nobody waits again for a disk that was waited for in vain"
        full.writer._has_room.set()
        await full.message(link, Ping(2))
        full.writer._has_room.clear()
        waits = asyncio.create_task(full.message(link, Records((DELTA,))))
        await asyncio.sleep(0.01)
        assert not waits.done(), "it has worked since"
        full.writer._has_room.set()
        await waits
        assert full.told[6:] == [Records((DELTA,))]


async def test_what_is_read_to_leave_deltas_out_costs_its_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    dialler, listener = End(1), End(2)
    async with listening(dialler, listener):
        _, link = await linked(dialler, listener)
        full = Full(monkeypatch)
        now = 0.0

        def slow(data: bytes) -> Message:
            nonlocal now
            now += 3.0
            return decode(data)

        costs: list[float] = []
        monkeypatch.setattr(reception_module, "PAUSE_MAX_S", 0.01)
        monkeypatch.setattr(reception_module, "decode", slow)
        monkeypatch.setattr(reception_module.time, "thread_time", lambda: now)
        monkeypatch.setattr(PeerScores, "heard", lambda *args: costs.append(args[3]) or 0.0)
        for message in (Records((DELTA,)), Ping(1)):
            await full.message(link, message)
        assert costs == [3.0, 3.0]


async def test_no_message_waits_for_the_disk_longer_than_its_link_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dialler, listener = End(1), End(2)
    async with listening(dialler, listener):
        _, link = await linked(dialler, listener)
        full = Full(monkeypatch)
        monkeypatch.setattr(reception_module, "PAUSE_MAX_S", 3600.0)
        waits = asyncio.create_task(full.message(link, Records((DELTA,))))
        await asyncio.sleep(0.01)
        assert not waits.done()
        link.close_soon()
        await until(waits.done)
        assert full.told == [Records(())]
