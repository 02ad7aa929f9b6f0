"""`gossamer.node.daemon.network.links`: a bounded queue, and a peer that takes nothing is cut off."""

from __future__ import annotations

import asyncio
import time

import pytest

from gossamer.node.daemon.network import links as link_module
from gossamer.protocol.limits import SEND_QUEUE_BYTES_MAX
from tests.node.trainer_side import until
from tests.node.wires import End, linked, listening


async def test_messages_keep_their_order_and_are_counted() -> None:
    dialler, listener = End(1), End(2)
    async with listening(dialler, listener):
        out, inward = await linked(dialler, listener)
        messages = [bytes([i % 256]) * (i + 1) for i in range(500)]
        for message in messages:
            out.send(message)
        await until(lambda: len(listener.messages) == 500)
        assert listener.messages == messages
        total = sum(map(len, messages))
        assert (out.traffic.sent, inward.traffic.received) == (total, total)
        assert out.dropped == 0 and out._queued_bytes == 0


async def test_messages_that_come_at_once_let_others_have_their_turn() -> None:
    """A second's worth of records may come in one piece, and each takes a while to check."""
    dialler, listener = End(1), End(2)
    async with listening(dialler, listener):
        out, _ = await linked(dialler, listener)
        for _ in range(500):
            out.send(b"a message")
        at_once = last = 0
        while last < 500:
            await asyncio.sleep(0)
            last, before = len(listener.messages), last
            at_once = max(at_once, last - before)
        assert at_once <= 2


async def test_a_full_queue_drops_and_counts() -> None:
    dialler, listener = End(1), End(2)
    async with listening(dialler, listener):
        out, _ = await linked(dialler, listener)
        piece = bytes(1 << 20)
        for _ in range(20):
            out.send(piece)  # without a pause: nothing goes out in between
        fit = SEND_QUEUE_BYTES_MAX // len(piece)
        assert out.dropped == 20 - fit
        assert out._queued_bytes <= SEND_QUEUE_BYTES_MAX
        await until(lambda: len(listener.messages) == fit)
        out.send(b"room again")
        await until(lambda: listener.messages[-1] == b"room again")


async def test_closing_lets_the_queue_out_first() -> None:
    dialler, listener = End(1), End(2)
    async with listening(dialler, listener):
        out, _ = await linked(dialler, listener)
        for i in range(100):
            out.send(bytes([i]))
        out.close_soon()
        await until(lambda: dialler.gone and listener.gone)
        assert len(listener.messages) == 100


@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize("who", ["dialler", "listener"])
async def test_a_peer_that_takes_nothing_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, who: str, tls: bool
) -> None:
    """As a frozen process: its socket stays open and is never read."""
    monkeypatch.setattr(link_module, "WRITE_TIMEOUT_S", 0.2)
    dialler, listener = End(1, tls=tls), End(2, tls=tls)
    async with listening(dialler, listener):
        out, inward = await linked(dialler, listener)
        sender, frozen, end = (out, inward, dialler) if who == "dialler" else (inward, out, listener)
        stuck = asyncio.Event()

        async def never(data: bytes) -> None:
            await stuck.wait()

        other = dialler if who == "listener" else listener
        monkeypatch.setattr(other, "message", lambda link, data: never(data))
        begun = time.monotonic()
        try:
            while not end.gone and time.monotonic() - begun < 10:
                sender.send(bytes(1 << 20))
                await asyncio.sleep(0.005)
        finally:
            stuck.set()
            frozen.close_soon()
        assert end.gone == [sender], "the link has ended for us, whatever the other does"
        assert sender.dropped > 0


@pytest.mark.parametrize("tls", [True, False])
@pytest.mark.parametrize("who", ["dialler", "listener"])
async def test_a_link_that_was_hung_up_is_cut_though_its_queue_has_not_gone_out(
    monkeypatch: pytest.MonkeyPatch, who: str, tls: bool
) -> None:
    """It counts as no link any more: whoever reads slowly enough could keep any number of them."""
    monkeypatch.setattr(link_module, "CLOSING_TIMEOUT_S", 0.1)
    dialler, listener = End(1, tls=tls), End(2, tls=tls)
    async with listening(dialler, listener):
        out, inward = await linked(dialler, listener)
        sender, frozen = (out, inward) if who == "dialler" else (inward, out)
        end, other = (dialler, listener) if who == "dialler" else (listener, dialler)
        stuck = asyncio.Event()

        async def never(data: bytes) -> None:
            await stuck.wait()

        monkeypatch.setattr(other, "message", lambda link, data: never(data))
        try:
            while not sender.dropped:
                sender.send(bytes(1 << 20))
                await asyncio.sleep(0)
            sender.close_soon()
            await until(lambda: end.gone == [sender])
            assert sender._queue, "and all that waits goes with it"
        finally:
            stuck.set()
            frozen.close_soon()


async def test_a_rest_ends_with_the_link() -> None:
    dialler, listener = End(1), End(2)
    async with listening(dialler, listener):
        _, inward = await linked(dialler, listener)
        resting = asyncio.create_task(inward.rest(60.0))
        await asyncio.sleep(0)
        inward.close_soon()
        async with asyncio.timeout(5):
            await resting
        assert inward.throttled_s == 60.0
