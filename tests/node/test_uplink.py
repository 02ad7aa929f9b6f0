"""`uplink`: few bodies at once on a slow line, many on a fast one, and who takes nothing holds nobody up."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from gossamer.node.network import uplink as uplink_module
from gossamer.node.network.link import PeerLink
from gossamer.node.network.uplink import (
    PACE_AT_FIRST,
    PACE_HALF_LIFE_S,
    PIECE_BYTES,
    PLACES_MIN,
    SHARE_BYTES_PER_S,
    STALL_S,
    BusyError,
    Turn,
    Uplink,
)
from gossamer.protocol.limits import CHUNK_BYTES_MAX
from tests.node.trainer_side import until


class FakeLink:
    def __init__(self) -> None:
        self.serving = asyncio.Lock()


def link() -> PeerLink:
    return cast(PeerLink, FakeLink())


class Line:
    """An uplink and its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.uplink = Uplink(lambda: self.now)

    def carry(self, turns: list[Turn], bytes_per_s: float, seconds: float) -> None:
        """Send over all of them at once, so much in all."""
        pieces = int(seconds * bytes_per_s / PIECE_BYTES)
        for number in range(pieces):
            self.now += seconds / pieces
            turns[number % len(turns)].sent(PIECE_BYTES)

    async def all_that_may(self, count: int) -> tuple[list[Turn], list[asyncio.Task[Turn]]]:
        """Ask for so many turns, a link each: those that are had, and those that wait."""
        tasks = [asyncio.create_task(self.uplink.turn(link())) for _ in range(count)]
        for _ in range(3 * count):
            await asyncio.sleep(0)
        return [task.result() for task in tasks if task.done()], [t for t in tasks if not t.done()]


async def test_a_slow_line_carries_few_at_a_time_in_their_order() -> None:
    line = Line()
    turns, waiting = await line.all_that_may(12)
    assert len(turns) == PACE_AT_FIRST // SHARE_BYTES_PER_S
    line.carry(turns, 125e3, PACE_HALF_LIFE_S)
    assert line.uplink.places == PLACES_MIN
    for turn in turns[PLACES_MIN - 1 :]:
        turn.end()
        turn.end()
    await until(waiting[0].done)
    assert not any(task.done() for task in waiting[1:])
    waiting[0].result().end()
    await until(waiting[1].done)
    assert not any(task.done() for task in waiting[2:])
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize("first_s", [0.0, 3600.0])
async def test_a_fast_line_carries_many(first_s: float) -> None:
    line = Line()
    line.now = first_s
    turns, waiting = await line.all_that_may(40)
    line.carry(turns, 6.25e6, 8.0)
    assert line.uplink.is_fast
    await until(lambda: all(task.done() for task in waiting))


async def test_who_takes_nothing_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink_module, "LOOK_S", 0.01)
    line = Line()
    turns, waiting = await line.all_that_may(PACE_AT_FIRST // SHARE_BYTES_PER_S + 1)
    line.now += 0.9 * STALL_S
    turns[0].sent(PIECE_BYTES)
    line.now += 0.2 * STALL_S
    assert [turn.is_stalled() for turn in turns] == [False] + [True] * (len(turns) - 1)
    await until(waiting[0].done)


async def test_a_few_that_take_little_keep_nobody_from_a_line_that_carries_much() -> None:
    line = Line()
    turns, _ = await line.all_that_may(4)
    line.carry(turns, 6.25e6, 8.0)
    for turn in turns:
        turn.end()
    slow, _ = await line.all_that_may(20)
    for _ in range(30):
        line.carry(slow, len(slow) * PIECE_BYTES / STALL_S, 1.1 * STALL_S)
        others, waiting = await line.all_that_may(1)
        assert not waiting
        line.carry(others, 6.25e6, 0.16)
        others[0].end()


async def test_who_takes_fast_need_not_wait_for_who_takes_slowly() -> None:
    line = Line()
    slow, waiting = await line.all_that_may(5)
    line.carry(slow, 60e3, 4 * PACE_HALF_LIFE_S)
    assert line.uplink.places == PLACES_MIN
    for turn in slow[1:]:
        turn.end()
    slow, turn = slow[:1], await waiting[0]
    for seconds, is_fast in ((0.5, True), (20.0, False)):
        line.carry([turn], CHUNK_BYTES_MAX / seconds, seconds)
        slow[0].sent(PIECE_BYTES)
        turn.end()
        if is_fast:
            slow.append(await line.uplink.turn(link()))  # another comes first
        slow[1].sent(PIECE_BYTES)
        again = asyncio.create_task(line.uplink.turn(turn.link))
        for _ in range(9):
            await asyncio.sleep(0)
        assert again.done() == is_fast
        if is_fast:
            turn = again.result()
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)


async def test_a_full_line_is_waited_for_so_long_and_a_link_after_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uplink_module, "TURN_PATIENCE_S", 0.05)
    line = Line()
    turns, _ = await line.all_that_may(4)
    other = link()
    with pytest.raises(BusyError):
        await line.uplink.turn(other)
    assert not other.serving.locked()
    turns[0].end()
    turn = await line.uplink.turn(other)
    second = asyncio.create_task(line.uplink.turn(other))
    turns[1].end()
    await asyncio.sleep(0)
    assert not second.done(), "there is room, but one chunk after another goes to each"
    turn.end()
    (await second).end()
    assert not other.serving.locked()


async def test_a_fast_line_is_not_idle_until_the_answer_comes() -> None:
    line = Line()
    (turn,), _ = await line.all_that_may(1)
    turn.all_sent()
    assert line.uplink._crossing == {turn}, "what is sent still is in the buffers of a slow line"
    line.carry([turn], 6.25e6, 8.0)
    turn.all_sent()
    assert not line.uplink._crossing
