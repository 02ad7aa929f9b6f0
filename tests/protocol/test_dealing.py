"""Dealing: every chunk to one neighbour, and all to all once it is with others, or gets nowhere."""

from __future__ import annotations

import random
from collections.abc import Iterable

from gossamer.protocol import limits
from gossamer.protocol.effects import Effect, Send
from gossamer.protocol.gossip.announce import Dealing
from gossamer.protocol.messages import Have, HaveChunks, Records
from gossamer.protocol.records import Delta
from tests.protocol import builders

LINKS = {1, 2, 3}


def _delta(chunks: int) -> Delta:
    return builders.unsigned(1, 1, chunks=tuple(bytes([number]) * 32 for number in range(chunks)))


def _sent(effects: Iterable[Effect], kind: type) -> dict[int, object]:
    return {e.link: e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)}


def _dealt(chunks: int = 8) -> tuple[Dealing, Delta, list[Effect]]:
    dealing, delta = Dealing(random.Random(1)), _delta(chunks)
    return dealing, delta, dealing.deal(delta, LINKS, 10.0)


def test_every_chunk_is_dealt_once_and_everybody_has_the_record():
    _, delta, effects = _dealt()
    assert _sent(effects, Records) == dict.fromkeys(LINKS, Records(((delta.data, False),)))
    hands = [message.places for message in _sent(effects, HaveChunks).values()]
    assert sorted(place for hand in hands for place in hand) == list(range(8))
    assert sorted(map(len, hands)) == [2, 3, 3]


def test_all_is_offered_once_all_was_heard_of():
    dealing, delta, _ = _dealt()
    assert dealing.heard_parts(delta.record_id, range(7), 11.0) == []
    assert dealing.heard_parts(b"another".ljust(32), range(8), 11.0) == []
    assert dealing.deadline() == 11.0 + limits.DEAL_PATIENCE_S
    assert set(_sent(dealing.heard_parts(delta.record_id, (7,), 11.5), Have)) == LINKS
    assert dealing.deadline() == float("inf")


def test_all_is_offered_when_it_gets_nowhere_or_a_neighbour_goes():
    dealing, delta, _ = _dealt()
    assert dealing.wake(dealing.deadline() - 0.01) == []
    offers = _sent(dealing.wake(dealing.deadline()), Have)
    assert offers == dict.fromkeys(LINKS, Have((delta.record_id,)))
    dealing, _, _ = _dealt()
    assert set(_sent(dealing.link_down(2), Have)) == LINKS - {2}
    assert dealing.link_down(3) == []


def test_old_news_and_no_news_win_no_time():
    """Else a neighbour could put the rest off for ever."""
    dealing, delta, _ = _dealt()
    dealing.heard_parts(delta.record_id, (3,), 11.0)
    for places in ((), (3,), (99,)):
        assert dealing.heard_parts(delta.record_id, places, 12.0) == []
    assert dealing.deadline() == 11.0 + limits.DEAL_PATIENCE_S


def test_who_holds_it_all_is_not_told():
    dealing, delta, _ = _dealt()
    assert set(_sent(dealing.heard(delta.record_id, 1), Have)) == LINKS - {1}
    assert dealing.heard(delta.record_id, 2) == []


def test_who_took_nothing_is_dealt_nothing_until_it_holds_something():
    dealing, delta, _ = _dealt()
    dealing.wake(dealing.deadline())
    for link in (1, 2):
        dealing.heard(delta.record_id, link)
    effects = dealing.deal(_delta(8), LINKS, 20.0)
    assert set(_sent(effects, Records)) == LINKS and set(_sent(effects, HaveChunks)) == {1, 2}
    assert set(_sent(dealing.wake(dealing.deadline()), Have)) == LINKS, "it may still take all"
    dealing.heard(delta.record_id, 3)
    (pushed,) = set(_sent(dealing.deal(_delta(8), LINKS, 30.0), Records).values())
    assert pushed.entries[0][1], "with one taker there is nothing to deal"
    for link in LINKS:
        dealing.heard(delta.record_id, link)
    assert set(_sent(dealing.deal(_delta(8), LINKS, 40.0), HaveChunks)) == LINKS


def test_a_link_that_is_new_is_dealt_its_share():
    dealing, _, _ = _dealt()
    dealing.wake(dealing.deadline())
    dealing.link_down(1)
    assert dealing.deal(_delta(8), LINKS, 20.0), "silent but for one"
    dealing.link_down(2)
    assert set(_sent(dealing.deal(_delta(8), LINKS, 30.0), HaveChunks)) == {1, 2}


def test_what_cannot_be_dealt_is_pushed_whole():
    dealing = Dealing(random.Random(1))
    small, large = _delta(1), _delta(2)
    many = set(range(limits.PUSH_FANOUT + 3))
    effects = dealing.deal(small, many, 0.0)
    assert len(_sent(effects, Records)) == len(effects) == limits.PUSH_FANOUT
    assert dealing.deal(large, {5}, 0.0) == [Send(5, Records(((large.data, True),)))]
    assert dealing.deal(large, set(), 0.0) == []
    assert dealing.deadline() == float("inf")
