"""Who is told what: a few links of a record, whoever waits of a payload; and no round is signed twice."""

from __future__ import annotations

import math

import pytest

from gossamer.protocol import limits
from gossamer.protocol.effects import Close, Effect, Get, Keep, Notice, Send, Store
from gossamer.protocol.fetching.fetcher import Fetcher
from gossamer.protocol.gossip.announce import Author, Holdings
from gossamer.protocol.messages import Have, HaveChunks, NewDelta, Records
from gossamer.protocol.records import NO_RECORD, Delta, DeltaBody
from tests.protocol import builders
from tests.protocol.cost import calls

A, B = b"a" * 32, b"b" * 32
SIZE = 2 * limits.PAYLOAD_CHUNK_BYTES_MIN + 1
LAYOUT = builders.SMALL.plan()


def _delta(chunks: int, author: int = 1, round_: int = 1) -> Delta:
    hashes = tuple(bytes([number + 1]) * 32 for number in range(chunks))
    size = (chunks - 1) * limits.PAYLOAD_CHUNK_BYTES_MIN + 1
    return builders.unsigned(author, round_, chunks=hashes, payload_bytes=size)


def _sent(effects: list[Effect], kind: type) -> dict[int, object]:
    return {e.link: e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)}


class Bench:
    """The machines of one node with links 1 to n to the nodes of those numbers."""

    def __init__(self, links: int = 3) -> None:
        self.context = builders.context(links=links)
        self.ledger = self.context.ledger
        self.have: set[bytes] = set()
        self.fetcher = Fetcher(self._fits, self.context.rng, self.context.outbox)
        for link in range(1, links + 1):
            self.fetcher.link_up(link, outbound=True)
        holdings = Holdings(self.context, self.fetcher)
        self.holdings = builders.Drained(holdings, self.context.outbox)
        self.announcer = builders.Drained(holdings.announcer, self.context.outbox)
        self.author = builders.Drained(Author(self.context, holdings), self.context.outbox)

    def _fits(self, blob: bytes, size: int) -> bool | None:
        return blob in self.have or None

    def add(self, delta: Delta, source: int = 2) -> list[Effect]:
        self.holdings.add(delta, source, 0.0)
        return self.context.outbox.drain()

    def plan(self, now: float = 0.0) -> list[Effect]:
        self.fetcher.plan(now)
        return self.context.outbox.drain()

    def deal(self, delta: Delta, now: float, chunk: bytes = b"") -> list[Effect]:
        self.announcer.deal(delta, now, chunk)
        return self.context.outbox.drain()

    def chunk(self, blob: bytes, now: float) -> list[Effect]:
        self.have.add(blob)
        effects: list[Effect] = self.holdings.arrived(blob, now)
        return effects


# --- records


def test_a_push_goes_to_a_few_links_in_batches_and_not_back():
    bench = Bench(links=10)
    deltas = [builders.unsigned(1, r) for r in range(1, 71)]
    effects = bench.announcer.push(deltas, 3)
    targets = {e.link for e in effects}
    assert len(targets) == limits.PUSH_FANOUT and 3 not in targets
    for target in targets:
        sent = [e.message.entries for e in effects if e.link == target]
        assert [len(entries) for entries in sent] == [32, 32, 6]
        assert [data for entries in sent for data, _ in entries] == [d.data for d in deltas]
    few = Bench(links=2)
    assert {e.link for e in few.announcer.push(deltas[:1], 1)} == {2}


def test_links_without_the_record_hear_of_its_payload():
    bench = Bench(links=10)
    bench.announcer.push([builders.unsigned(1, 1)], 3)
    record_id = builders.unsigned(1, 1).record_id
    bench.announcer.complete(record_id, 0.0)
    told = bench.announcer.wake(limits.OFFER_DELAY_S)
    assert told == [Send(link, Have((record_id,))) for link in range(1, 11) if link != 3]


# --- promised payloads


def test_promises_are_kept_once_and_in_one_message():
    announcer = Bench().announcer
    for link in (1, 2):
        announcer.promise(A, link)
    announcer.promise(B, 2)
    announcer.complete(A, 10.0)
    announcer.complete(B, 10.01)
    assert announcer.deadline() == 10.0 + limits.OFFER_DELAY_S
    assert announcer.wake(10.01) == []
    assert announcer.wake(announcer.deadline()) == [Send(1, Have((A,))), Send(2, Have((A, B)))]
    announcer.complete(A, 20.0)
    assert announcer.wake(21.0) == []


def test_whoever_has_it_or_is_gone_is_not_told():
    announcer = Bench().announcer
    for link in (1, 2, 3):
        for record_id in (A, B):
            announcer.promise(record_id, link)
    announcer.holds(A, 1)
    announcer.complete(A, 0.0)
    announcer.complete(B, 0.0)
    announcer.holds(A, 2)
    announcer.forget(B)
    assert announcer.wake(1.0) == [Send(3, Have((A,)))]
    announcer.promise(A, 3)
    announcer.link_down(3)
    announcer.complete(A, 1.0)
    assert announcer.wake(2.0) == [] and not announcer._waiting


def test_chunks_are_offered_sooner():
    announcer = Bench().announcer
    for place in (4, 0):
        announcer.part(A, place, {1, 2, 3}, 0.0)
    announcer.part(A, 5, set(), 0.0)
    announcer.link_down(1)
    assert announcer.deadline() == limits.PART_DELAY_S
    sent = announcer.wake(limits.PART_DELAY_S)
    assert sent == [Send(link, HaveChunks(A, (4, 0))) for link in (2, 3)]


# --- super-seeding


def _dealt(chunks: int = 8) -> tuple[Bench, Delta, list[Effect]]:
    bench, delta = Bench(), _delta(chunks)
    return bench, delta, bench.deal(delta, 10.0)


def _offered(bench: Bench, now: float) -> set[int]:
    """Links that are offered all of it once the deal has ended."""
    assert not bench.announcer._deals and bench.announcer.deadline() == now + limits.OFFER_DELAY_S
    return set(_sent(bench.announcer.wake(bench.announcer.deadline()), Have))


def test_every_chunk_is_dealt_once_and_everybody_has_the_record():
    _, delta, effects = _dealt()
    assert _sent(effects, Records) == dict.fromkeys((1, 2, 3), Records(((delta.data, False),)))
    hands = [message.places for message in _sent(effects, HaveChunks).values()]
    assert sorted(place for hand in hands for place in hand) == list(range(8))
    assert sorted(map(len, hands)) == [2, 3, 3]


def test_all_is_offered_once_others_hold_all_of_it():
    bench, delta, _ = _dealt()
    for record_id, places, now in (
        (delta.record_id, range(7), 11.0),
        (A, range(8), 11.0),
        (delta.record_id, (3, 99), 12.0),
    ):
        bench.announcer.holds_parts(record_id, places, now)
    assert bench.announcer.deadline() == 11.0 + limits.DEAL_PATIENCE_S, "no news wins no time"
    bench.announcer.holds_parts(delta.record_id, (7,), 11.5)
    assert _offered(bench, 11.5) == {1, 2, 3}


def test_all_is_offered_when_a_deal_stalls_say_since_a_neighbour_went():
    bench, _, _ = _dealt()
    stalled = bench.announcer.deadline()
    bench.announcer.link_down(2)
    assert bench.announcer.wake(stalled - 0.01) == bench.announcer.wake(stalled) == []
    assert _offered(bench, stalled) == {1, 3}


@pytest.mark.parametrize(("links", "chunks"), [(7, 1), (1, 2), (0, 2)])
def test_what_cannot_be_dealt_is_pushed_whole(links, chunks):
    bench, delta = Bench(links), _delta(chunks)
    bench.holdings.add_own(delta)
    effects = bench.deal(delta, 0.0)
    assert len(effects) == min(links, limits.PUSH_FANOUT)
    assert all(effect.message == Records(((delta.data, True),)) for effect in effects)
    assert bench.announcer.deadline() == math.inf


@pytest.mark.parametrize(
    ("links", "size", "goes"), [(1, 200_000, True), (4, 65_536, True), (4, 65_537, False)]
)
def test_a_short_chunk_goes_along_with_its_record(links, size, goes):
    bench, delta = Bench(links), _delta(1)
    bench.holdings.add_own(delta)
    effects = bench.deal(delta, 0.0, bytes(size))
    whole = NewDelta(delta.data, bytes(size)) if goes else Records(((delta.data, True),))
    assert [effect.message for effect in effects] == [whole] * links


def test_what_came_along_counts_as_asked_for_until_it_is_stored():
    bench, delta = Bench(), _delta(1)
    bench.add(delta)
    bench.holdings.known_to(delta.record_id, 2, held=True)
    kept = Keep(2, delta.body.chunks[0], delta.body.payload_bytes, b"x")
    assert bench.holdings.brought(delta, b"x", 2, 0.0) == [kept]
    assert bench.plan() == [] and bench.holdings.brought(delta, b"x", 3, 0.0) == []
    window = bench.fetcher.requests.window
    bench.fetcher.failed(2, delta.body.chunks[0], 0.0)
    bench.holdings.known_to(delta.record_id, 3, held=True)
    assert [effect.link for effect in bench.plan() if isinstance(effect, Get)] == [3], "it was not stored"
    bench.chunk(delta.body.chunks[0], 1.0)
    assert bench.holdings.holds(delta.record_id) and bench.fetcher.requests.window > window


def test_what_comes_along_and_is_not_wanted_is_not_kept():
    bench, several = Bench(), _delta(2)
    bench.add(several)
    assert bench.holdings.brought(several, b"x", 2, 0.0) == [], "not the whole payload"
    here = _delta(1, round_=2)
    bench.have.add(here.body.chunks[0])
    bench.add(here)
    assert bench.holdings.brought(here, b"x", 2, 0.0) == []
    for round_ in range(3, 4 + limits.FETCHES_PER_LINK_MAX):
        delta = builders.unsigned(1, round_, chunks=(bytes([99, round_]) * 16,), payload_bytes=1)
        bench.add(delta)
        kept = bench.holdings.brought(delta, b"x", 2, 0.0)
        assert len(kept) == (round_ < 3 + limits.FETCHES_PER_LINK_MAX)


# --- what is here


def test_a_chunk_that_comes_twice_in_a_payload_is_announced_in_both_places() -> None:
    """Zeros, say. Else its author, who dealt both, would wait to hear of the second."""
    bench = Bench(links=2)
    zeros, other = bytes(32), b"\1" * 32
    delta = builders.unsigned(1, 1, payload_bytes=SIZE, chunks=(zeros, zeros, other))
    bench.add(delta)
    bench.holdings.parts_known_to(delta, (0, 1), 1, 0.0)
    assert [effect.blob for effect in bench.plan() if isinstance(effect, Get)] == [zeros]
    bench.chunk(zeros, 1.0)
    assert bench.announcer.wake(2.0) == [Send(2, HaveChunks(delta.record_id, (0, 1)))]


def test_who_claims_chunks_that_there_are_not_is_not_believed() -> None:
    bench = Bench(links=2)
    delta = _delta(2)
    bench.add(delta)
    bench.holdings.parts_known_to(delta, (2, limits.PAYLOAD_CHUNKS_MAX - 1), 1, 0.0)
    assert bench.plan() == []
    bench.holdings.parts_known_to(delta, (2, 1), 1, 0.0)
    assert [get.blob for get in bench.plan() if isinstance(get, Get)] == [delta.body.chunks[1]]


def test_payloads_up_to_a_round_are_lacking_once_somebody_may_hold_them() -> None:
    bench = Bench()
    bench.holdings.add(builders.unsigned(1, 3), 2, 1.0)
    bench.holdings.add_own(builders.unsigned(2, 2))
    lacks = [bench.holdings.lacks_payloads(*at) for at in ((2, 1.0), (3, 0.0), (3, 1.0), (7, 1.0))]
    assert lacks == [False, False, True, True]


@pytest.mark.parametrize(
    ("source", "now", "announced_to"),
    [(1, 1.0, [1]), (2, 1.0, [])],
    ids=["its author waits to hear of it", "nobody else asked"],
)
def test_who_is_told_that_a_payload_is_here(source, now, announced_to) -> None:
    bench = Bench()
    author = builders.identity(1)
    delta = builders.signed(author, builders.body_of(b"x", "int8", 2, 2))
    bench.add(delta, source)
    bench.holdings.known_to(delta.record_id, source, held=True)
    bench.plan(now)
    bench.chunk(delta.body.chunks[0], now)
    sent = bench.announcer.wake(now + limits.OFFER_DELAY_S)
    assert sent == [Send(link, Have((delta.record_id,))) for link in announced_to]


def test_a_key_in_two_places_is_reported_once_and_costs_no_look_at_all_rounds() -> None:
    def cost(rounds: int) -> int:
        bench = Bench()
        for round_ in range(1, rounds + 1):
            bench.add(builders.unsigned(1, round_))
        second = [builders.unsigned(1, round_, 1) for round_ in range(1, rounds + 1)]
        found = [bench.add(delta) for delta in second[:-1]]
        assert bench.holdings.changed == {delta.round for delta in second[:-1]}
        notices = [[e for e in effects if isinstance(e, Notice)] for effects in found]
        assert len(notices[0]) == 1 and not any(notices[1:])
        return calls(lambda: bench.holdings.add(second[-1], 1, 0.0))

    assert cost(300) == cost(30)


def test_what_is_closed_or_of_a_history_given_up_is_neither_held_nor_looked_for() -> None:
    bench = Bench()
    near, ahead, own = builders.unsigned(1, 1), builders.unsigned(1, 40), builders.unsigned(2, 1)
    for delta in (near, ahead):
        bench.add(delta)
    bench.holdings.add_own(own)
    assert bench.holdings.begin_at(0, 20) == [Close(0, (ahead,))]
    assert near.record_id in bench.fetcher.wants and ahead.record_id not in bench.fetcher.wants
    assert bench.holdings.holds(own.record_id)
    bench.holdings.close(1)
    assert not bench.holdings.holds(own.record_id) and near.record_id not in bench.fetcher.wants


def test_a_chunk_of_thousands_of_payloads_is_offered_as_part_of_a_few() -> None:
    """A liar may list the same ones in all its deltas."""
    bench = Bench(links=2)
    deltas = [_delta(2, round_=round_) for round_ in range(1, 101)]
    for number, delta in enumerate(deltas):
        bench.holdings.add(delta, 2, float(number))
    bench.context.outbox.drain()
    bench.chunk(deltas[0].body.chunks[0], 200.0)
    sent = [effect.message for effect in bench.announcer.wake(201.0)]
    oldest = [delta.record_id for delta in deltas[: limits.PAYLOADS_PER_CHUNK_MAX]]
    assert sorted(message.record_id for message in sent) == sorted(2 * oldest)
    bench.chunk(deltas[0].body.chunks[1], 201.0)
    assert not bench.context.outbox and all(bench.holdings.holds(delta.record_id) for delta in deltas)


# --- our own deltas


def body(round_: int, **changes: object) -> DeltaBody:
    return builders.body_of(b"payload", "int8", round_, len(LAYOUT.fragments), **changes)


def test_a_delta_counts_once_it_is_stored_and_names_the_one_before():
    bench = Bench()
    (first,) = bench.author.publish(body(1))
    assert isinstance(first, Store) and first.own and len(bench.ledger) == 0
    assert first.delta.body.previous == NO_RECORD
    assert bench.author.stored(first.delta)
    assert bench.context.outbox.drain() == [] and bench.holdings.changed == {1}
    assert bench.holdings.holds(first.delta.record_id)
    (second,) = bench.author.publish(body(2))
    assert second.delta.body.previous == first.delta.record_id


def test_no_round_is_signed_twice_stored_or_not():
    author = Bench().author
    assert isinstance(author.publish(body(5))[0], Store)
    for round_ in (5, 4):
        assert isinstance(author.publish(body(round_))[0], Notice)
    bench = Bench()
    bench.author.restore([3, 7, 2])
    assert bench.author.has_signed and bench.author.last_round == 7
    bench.ledger.note_last(bench.context.identity.node_id, 9, bytes(32))
    assert bench.author.last_round == 9, "others know of more"
    assert isinstance(bench.author.publish(body(9))[0], Notice)
    assert isinstance(bench.author.publish(body(10))[0], Store)


def test_nothing_is_signed_for_a_round_that_is_closed():
    """A full disk kept it back for longer than rounds are: nobody would take it. The next one is signed."""
    bench = Bench()
    bench.ledger.close(8)
    (notice,) = bench.author.publish(body(8))
    assert "closed" in notice.text
    assert isinstance(bench.author.publish(body(9))[0], Store)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_what_nobody_would_take_is_not_signed(loss):
    author = Bench().author
    assert isinstance(author.publish(body(1, loss=loss))[0], Notice)
    assert author.last_round == 0


def test_who_may_not_train_signs_nothing():
    context = builders.context(of=builders.manifest(admission=builders.admission()))
    author = Author(context, Holdings(context, Fetcher(lambda blob, size: None, context.rng, context.outbox)))
    author.publish(body(1))
    assert isinstance(context.outbox.drain()[0], Notice) and author.last_round == 0


def test_a_delta_is_spread_once_somebody_else_holds_it_or_it_does_not_count_any_more():
    bench = Bench()
    assert bench.author.last_are_spread, "there is nothing to lose"
    (store,) = bench.author.publish(body(1))
    bench.author.stored(store.delta)
    bench.author.spread([bytes(32)])
    assert not bench.author.last_are_spread
    bench.author.spread([bytes(32), store.delta.record_id])
    bench.author.spread([])
    assert bench.author.last_are_spread
    (store,) = bench.author.publish(body(2))
    bench.author.stored(store.delta)
    assert not bench.author.last_are_spread
    bench.ledger.close(2)
    assert bench.author.last_are_spread
