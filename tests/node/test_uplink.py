"""`uplink`: few bodies at once on a slow line, many on a fast one, and who takes nothing holds nobody up."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from gossamer.node.daemon.network import upload_limits as uplink_module
from gossamer.node.daemon.network.links import PeerLink
from gossamer.node.daemon.network.upload_limits import (
    BUFFERED_BYTES,
    FLOW_S,
    LARGE_PIECE_BYTES,
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
from gossamer.protocol.limits import CHUNK_BYTES_MAX, TURN_PATIENCE_S
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
    line.carry(turns, 60e3, 2 * PACE_HALF_LIFE_S)
    assert line.uplink.places == PLACES_MIN
    for turn in turns[PLACES_MIN - 1 :]:
        turn.end()
        turn.end()
    await until(waiting[0].done)
    assert not any(task.done() for task in waiting[1:])
    waiting[0].result().end()
    await until(waiting[1].done)
    assert not any(task.done() for task in waiting[2:])
    await _cancelled(*waiting)


async def _is_done(task: asyncio.Task[Turn]) -> bool:
    """Whether somebody has a turn, after all have had time to take one."""
    for _ in range(60):
        await asyncio.sleep(0)
    return task.done()


async def _cancelled(*tasks: asyncio.Task[Turn]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("first_s", [0.0, 3600.0])
async def test_a_fast_line_carries_many(first_s: float) -> None:
    line = Line()
    line.now = first_s
    turns, waiting = await line.all_that_may(40)
    line.carry(turns, 6.25e6, 8.0)
    assert line.uplink.is_fast
    await asyncio.gather(*waiting)  # and nobody was declined


async def test_who_takes_nothing_holds_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink_module, "LOOK_S", 0.01)
    line = Line()
    turns, waiting = await line.all_that_may(PACE_AT_FIRST // SHARE_BYTES_PER_S + 1)
    line.now += 0.9 * STALL_S
    turns[0].sent(PIECE_BYTES)
    line.now += 0.2 * STALL_S
    assert [turn.is_stalled() for turn in turns] == [False] + [True] * (len(turns) - 1)
    await waiting[0]  # and it was not declined


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


async def test_takers_with_slow_lines_are_not_taken_for_a_slow_line_of_ours() -> None:
    line = Line()
    turns, waiting = await line.all_that_may(12)
    for _ in range(6):
        line.carry(turns, len(turns) * 48 * 1024, 2 * FLOW_S)
        turns += [task.result() for task in waiting if await _is_done(task)]
        waiting = [task for task in waiting if not task.done()]
    assert not waiting


async def test_what_fills_buffers_says_nothing_about_the_line() -> None:
    line = Line()
    for _ in range(9):
        turns, waiting = await line.all_that_may(PACE_AT_FIRST // SHARE_BYTES_PER_S)
        assert not waiting
        for turn in turns:
            turn.sent(BUFFERED_BYTES)
            turn.end()
    assert line.uplink.places == PACE_AT_FIRST // SHARE_BYTES_PER_S


async def test_an_idle_line_is_thought_of_as_before() -> None:
    line = Line()
    line.now += 10 * PACE_HALF_LIFE_S
    assert line.uplink.places == PACE_AT_FIRST // SHARE_BYTES_PER_S
    (turn,), _ = await line.all_that_may(1)
    line.now += 10 * PACE_HALF_LIFE_S
    turn.end()
    assert line.uplink.places == PLACES_MIN


@pytest.mark.parametrize("chunk_bytes", [CHUNK_BYTES_MAX, 200 * 1024])
async def test_those_known_to_take_slowly_keep_nobody_else_waiting(chunk_bytes: int) -> None:
    line = Line()
    slow, _ = await line.all_that_may(PLACES_MIN)
    for _ in range(3):
        line.carry(slow, 16 * 1024, chunk_bytes / (8 * 1024))
        for turn in slow:
            turn.end()
        slow = [await line.uplink.turn(turn._link) for turn in slow]
    line.now += 10 * PACE_HALF_LIFE_S
    for turn in slow:
        turn.sent(PIECE_BYTES)  # none has stalled
    assert line.uplink.places == PLACES_MIN
    third = await line.uplink.turn(link())
    third.sent(BUFFERED_BYTES + 1)
    line.now += 60.0
    third.end()
    for turn in slow:
        turn.sent(PIECE_BYTES)
    again = asyncio.create_task(line.uplink.turn(third._link))
    assert not await _is_done(again), "it is slow itself"
    others, waiting = await line.all_that_may(PLACES_MIN + 1)
    assert len(others) == PLACES_MIN and not again.done()
    await _cancelled(again, *waiting)
    for _ in range(9):
        others[0].end()
        others[0] = await line.uplink.turn(others[0]._link)


async def test_who_was_slow_is_not_for_good() -> None:
    line = Line()
    other = link()
    for seconds, is_slow in ((60.0, True), (0.1, True), (0.1, True), (0.1, True), (0.1, False)):
        turn = await line.uplink.turn(other)
        line.carry([turn], CHUNK_BYTES_MAX / seconds, seconds)
        turn.end()
        assert line.uplink._takers[other].is_slow is is_slow


async def test_what_waits_on_a_link_is_declined_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uplink_module, "LOOK_S", 0.01)
    line = Line()
    other = link()
    own = await line.uplink.turn(other)
    await line.all_that_may(9)
    monkeypatch.setattr(uplink_module.Uplink, "places", 0)
    waiting = [asyncio.create_task(line.uplink.turn(other)) for _ in range(3)]
    line.now += 10 * TURN_PATIENCE_S
    assert not any([await _is_done(task) for task in waiting]), "not while a body before them crosses"
    monkeypatch.setattr(uplink_module, "TURN_PATIENCE_S", 0.05)
    own.end()
    with pytest.raises(BusyError):
        await waiting[0]
    line.now += 0.05
    monkeypatch.setattr(uplink_module.Uplink, "places", 0)
    for task in waiting[1:]:
        with pytest.raises(BusyError):
            await task
    assert not other.serving.locked()


async def test_a_full_line_is_waited_for_so_long_and_a_link_after_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uplink_module, "TURN_PATIENCE_S", 0.05)
    line = Line()
    turns, _ = await line.all_that_may(PACE_AT_FIRST // SHARE_BYTES_PER_S)
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
    line.carry([turn], 10e3, 2 * PIECE_BYTES / 10e3)
    turn.all_sent()
    assert line.uplink._crossing == {turn}, "what is sent still is in the buffers of a slow line"
    line.carry([turn], 6.25e6, 8.0)
    turn.all_sent()
    assert not line.uplink._crossing


async def test_small_bodies_follow_each_other_without_waiting_for_answers() -> None:
    line = Line()
    (turn,), _ = await line.all_that_may(1)
    assert [bytes(piece) for piece in turn.pieces(b"small")] == [b"small"]
    turn.all_sent()
    assert not line.uplink._crossing and not turn._link.serving.locked()


async def test_a_fast_line_is_sent_large_pieces() -> None:
    line = Line()
    (turn,), _ = await line.all_that_may(1)
    data = bytes(range(256)) * 2048
    pieces = list(turn.pieces(data))
    assert b"".join(pieces) == data and {len(piece) for piece in pieces} == {PIECE_BYTES}
    line.carry([turn], 6.25e6, 8.0)
    turn.end()
    (turn,), _ = await line.all_that_may(1)
    pieces = list(turn.pieces(data))
    assert b"".join(pieces) == data and {len(piece) for piece in pieces} == {LARGE_PIECE_BYTES}
    turn.taker.is_slow = True
    pieces = list(turn.pieces(data))
    assert b"".join(pieces) == data and {len(piece) for piece in pieces} == {PIECE_BYTES}, "again, from 0"
