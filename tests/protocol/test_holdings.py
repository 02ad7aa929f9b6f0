"""What is here of a payload is told place by place."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

from gossamer.protocol import limits
from gossamer.protocol.effects import Get, Notice, Ready, Send
from gossamer.protocol.fetching.fetcher import Fetcher
from gossamer.protocol.gossip.announce import Holdings, Offers
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.membership.members import Roster
from gossamer.protocol.messages import Have, HaveChunks
from tests.protocol import builders
from tests.protocol.cost import calls


def _with_two_links() -> tuple[Holdings, Fetcher, Offers]:
    """Holdings of a node that has nothing yet."""
    rng = random.Random(1)
    fetcher, offers = Fetcher(lambda blob, size: None, rng), Offers()
    links: Any = SimpleNamespace(numbers={1, 2}, get=lambda _: None)
    holdings = Holdings(Ledger(), Roster(b""), links, fetcher, offers, rng)
    for link in (1, 2):
        fetcher.link_up(link, outbound=True)
    return holdings, fetcher, offers


def test_a_chunk_that_comes_twice_in_a_payload_is_told_of_in_both_places() -> None:
    """Zeros, say. Else its author, who dealt both, would wait to hear of the second."""
    holdings, fetcher, offers = _with_two_links()
    zeros, other = bytes(32), b"\1" * 32
    size = 2 * limits.PAYLOAD_CHUNK_BYTES_MIN + 1
    delta = builders.unsigned(1, 1, payload_bytes=size, chunks=(zeros, zeros, other))
    holdings.add(delta, 1, 0.0)
    holdings.hint_parts(delta, (0, 1), 1)
    assert fetcher.plan(0.0) == [Get(1, zeros, limits.PAYLOAD_CHUNK_BYTES_MIN, 24.0)]
    holdings.arrived(zeros, 1.0)
    (told,) = [cast(Send, effect) for effect in offers.wake(offers.deadline())]
    assert told == Send(2, HaveChunks(delta.record_id, (0, 1)))


def test_who_claims_parts_that_there_are_not_is_not_heard() -> None:
    """A record has as many chunks as it says, and a message may name any place."""
    holdings, fetcher, _ = _with_two_links()
    size, chunks = limits.PAYLOAD_CHUNK_BYTES_MIN + 1, (bytes(32), b"\1" * 32)
    delta = builders.unsigned(1, 1, payload_bytes=size, chunks=chunks)
    holdings.add(delta, 1, 0.0)
    holdings.hint_parts(delta, (2, limits.PAYLOAD_CHUNKS_MAX - 1), 1)
    assert fetcher.plan(0.0) == []
    holdings.hint_parts(delta, (2, 1), 1)
    assert [get.blob for get in fetcher.plan(0.0) if isinstance(get, Get)] == [chunks[1]]


def test_who_signs_two_deltas_for_every_round_is_reported_once_and_costs_no_look_at_all_rounds() -> None:
    """As a node and a copy of its folder do."""

    def cost(rounds: int) -> int:
        holdings, _, _ = _with_two_links()
        for round_ in range(1, rounds + 1):
            holdings.add(builders.unsigned(1, round_), 1, 0.0)
        found = [holdings.add(builders.unsigned(1, round_, 1), 1, 0.0) for round_ in range(1, rounds)]
        assert [any(isinstance(effect, Notice) for effect in effects) for effects in found[:2]] == [
            True,
            False,
        ]
        last = builders.unsigned(1, rounds, 1)
        return calls(lambda: holdings.add(last, 1, 0.0))

    assert cost(300) == cost(30)


def test_whose_payloads_are_lacking_up_to_a_round() -> None:
    rng = random.Random(1)
    fetcher = Fetcher(lambda blob, size: None, rng)
    links: Any = SimpleNamespace(numbers=set(), get=lambda _: None)
    holdings = Holdings(Ledger(), Roster(b""), links, fetcher, Offers(), rng)
    assert holdings.share_lacking(9, 0.0) == 0.0
    for author in range(4):
        delta = builders.unsigned(author, 3)
        if author == 3:
            holdings.add_own(delta)
        else:
            holdings.add(delta, 1, float(author))
    later = builders.unsigned(3, 7)
    holdings.add(later, 1, 0.0)
    assert holdings.share_lacking(2, 0.0) == 0.0, "of other rounds"
    assert holdings.share_lacking(3, 0.0) == 1 / 4
    assert holdings.share_lacking(3, 2.0) == 3 / 4
    assert holdings.share_lacking(7, 2.0) == 1.0
    later_on = limits.ORPHAN_PATIENCE_S + 1.0
    assert holdings.share_lacking(3, later_on) == 1 / 4, "nobody is known to hold the others for long"


class Bench:
    """Holdings with links 1 to 3; the first leads to the author of what comes."""

    def __init__(self) -> None:
        self.have: set[bytes] = set()
        rng = random.Random(1)
        self.fetcher, self.offers = Fetcher(lambda blob, size: blob in self.have or None, rng), Offers()
        self.delta = builders.unsigned(1, 1)
        peers = {
            number: SimpleNamespace(number=number, node_id=self.delta.author if number == 1 else bytes(32))
            for number in (1, 2, 3)
        }
        links: Any = SimpleNamespace(numbers=peers.keys(), get=peers.get)
        self.holdings = Holdings(Ledger(), Roster(b""), links, self.fetcher, self.offers, rng)
        for link in peers:
            self.fetcher.link_up(link, outbound=True)

    def come(self, source: int, now: float) -> list[int]:
        """The record comes from a link, its payload at a time; returns the links that are told."""
        self.fetcher.plan(0.0)
        self.holdings.add(self.delta, source, 0.0)
        self.holdings.hint(self.delta.record_id, source)
        self.fetcher.plan(now)
        for blob in self.delta.body.chunks:
            self.have.add(blob)
            self.holdings.arrived(blob, now)
        told = [cast(Send, effect) for effect in self.offers.wake(now + limits.OFFER_DELAY_S)]
        assert all(effect.message == Have((self.delta.record_id,)) for effect in told)
        return [effect.link for effect in told]


def test_an_author_hears_from_those_to_whom_it_gave_its_delta() -> None:
    """It may wait to leave until somebody else has it: but one word of that is enough, or a few."""
    assert Bench().come(source=1, now=1.0) == [1]
    assert Bench().come(source=2, now=1.0) == []


def test_what_was_long_looked_for_is_told_to_everybody() -> None:
    """All who are not known to hold it: they may not have asked for a while."""
    assert Bench().come(source=2, now=limits.ORPHAN_PATIENCE_S) == [1, 3]


def test_a_key_in_two_places_is_a_line_and_not_one_for_each_round() -> None:
    rng = random.Random(1)
    links: Any = SimpleNamespace(numbers=set(), get=lambda _: None)
    ledger = Ledger()
    holdings = Holdings(ledger, Roster(b""), links, Fetcher(lambda blob, size: None, rng), Offers(), rng)

    def equivocates(author: int, round_: int) -> list[str]:
        first, second = (builders.unsigned(author, round_, variant) for variant in (0, 1))
        holdings.add(first, 1, 0.0)
        effects = holdings.add(second, 1, 0.0)
        assert Ready(second) in effects and ledger.is_void(first)
        return [effect.text for effect in effects if isinstance(effect, Notice)]

    assert len(equivocates(1, 3)) == 1
    assert equivocates(1, 4) == equivocates(1, 5) == []
    assert len(equivocates(2, 4)) == 1, "somebody else"
    holdings.close(5)
    assert len(equivocates(1, 6)) == 1, "again, after a while"


def test_who_lacks_a_payload_is_told_which_chunks_of_it_are_here_already() -> None:
    holdings, _, offers = _with_two_links()
    size, chunks = 2 * limits.PAYLOAD_CHUNK_BYTES_MIN + 1, tuple(bytes([n]) * 32 for n in range(3))
    delta = builders.unsigned(1, 1, payload_bytes=size, chunks=chunks)
    holdings.add(delta, 1, 0.0)
    holdings.arrived(chunks[1], 1.0)
    offers.wake(offers.deadline())
    holdings.lacks(delta.record_id, 2, 5.0)
    assert offers.wake(offers.deadline()) == [Send(2, HaveChunks(delta.record_id, (1,)))]


def test_what_is_of_a_history_that_is_given_up_is_not_looked_for_any_more() -> None:
    bench = Bench()
    ahead = builders.unsigned(1, 40)
    for delta in (bench.delta, ahead):
        bench.holdings.add(delta, 1, 0.0)
    assert bench.holdings.begin_at(0, reach=20).deltas == (ahead,)
    assert bench.delta.record_id in bench.fetcher.wants and ahead.record_id not in bench.fetcher.wants


def test_what_is_closed_is_not_held_any_more() -> None:
    bench = Bench()
    bench.holdings.add_own(bench.delta)
    assert bench.holdings.holds(bench.delta.record_id)
    bench.holdings.close(bench.delta.round)
    assert not bench.holdings.holds(bench.delta.record_id)


def test_a_chunk_of_thousands_of_payloads_is_offered_as_part_of_a_few() -> None:
    """A liar may list the same ones in all its deltas: all nodes told each other of each, in tens of
    thousands of messages."""
    holdings, _, offers = _with_two_links()
    size, chunks = limits.PAYLOAD_CHUNK_BYTES_MIN + 1, (bytes(32), b"\1" * 32)
    deltas = [builders.unsigned(1, round_, payload_bytes=size, chunks=chunks) for round_ in range(1, 101)]
    for number, delta in enumerate(deltas):
        holdings.add(delta, 1, float(number))
    holdings.arrived(bytes(32), 200.0)
    told = [cast(Send, effect).message for effect in offers.wake(offers.deadline())]
    oldest = [delta.record_id for delta in deltas[: limits.PAYLOADS_PER_CHUNK_MAX]]
    assert {cast(HaveChunks, message).record_id for message in told} == set(oldest)
    assert len(told) == 2 * len(oldest)
    done = [effect.delta for effect in holdings.arrived(b"\1" * 32, 201.0) if isinstance(effect, Ready)]
    assert len(done) == len(deltas)
