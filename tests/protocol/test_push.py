"""Push: a few links at once, not back, and a small payload together with its record."""

from __future__ import annotations

import random

from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.effects import Send
from gossamer.protocol.gossip.announce import Push
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.records import Delta
from tests.protocol import builders


def test_push_goes_to_a_few_links_and_not_back():
    push = Push(Ledger(), lambda _: True, random.Random(0))
    for link in range(1, 11):
        push.link_up(link)
    deltas = [builders.unsigned(1, r) for r in range(1, 71)]
    effects = push.tell(deltas, known_to={3})
    targets = {e.link for e in effects}
    assert len(targets) == limits.PUSH_FANOUT
    assert 3 not in targets
    for target in targets:
        sent = [e.message.entries for e in effects if e.link == target]
        assert [len(entries) for entries in sent] == [32, 32, 6]
        assert [data for entries in sent for data, _ in entries] == [d.data for d in deltas]


def test_push_reaches_all_links_when_they_are_few():
    push = Push(Ledger(), lambda _: True, random.Random(0))
    push.link_up(1)
    push.link_up(2)
    assert {e.link for e in push.tell([builders.unsigned(1, 1)], known_to=set())} == {1, 2}
    assert {e.link for e in push.tell([builders.unsigned(1, 1)], known_to={1})} == {2}
    push.link_down(1)
    push.link_down(2)
    assert push.tell([builders.unsigned(1, 1)], known_to=set()) == []


def test_batches():
    entries = [(bytes([n]), False) for n in range(100)]
    cut = [m.entries for m in msg.Records.batches(entries)]
    assert [len(c) for c in cut] == [32, 32, 32, 4]
    assert [e for c in cut for e in c] == entries
    assert list(msg.Records.batches([])) == []


def test_a_record_without_its_payload_is_a_promise_to_each_link():
    ledger = Ledger()
    held, lacking = builders.unsigned(1, 1), builders.unsigned(2, 1)
    promised: list[tuple[bytes, int]] = []
    push = Push(
        ledger,
        lambda record_id: record_id == held.record_id,
        random.Random(0),
        lambda record_id, link: promised.append((record_id, link)),
    )
    for delta in (held, lacking):
        ledger.add(delta)
    for link in (1, 2, 3):
        push.link_up(link)
    push.tell([held, lacking], known_to={2})
    assert sorted(promised) == [(lacking.record_id, 1), (lacking.record_id, 3)]
    push.give(2, [held.record_id, lacking.record_id])
    assert promised[2:] == [(lacking.record_id, 2)]


def _relaying(links: int) -> tuple[Push, Delta, set[bytes]]:
    """One that has a record and not its payload, and the set that says of which it has."""
    ledger, held, delta = Ledger(), set[bytes](), builders.unsigned(1, 1)
    ledger.add(delta)
    push = Push(ledger, held.__contains__, random.Random(0))
    for link in range(1, links + 1):
        push.link_up(link)
    return push, delta, held


def test_a_small_payload_is_told_of_together_with_its_record():
    push, delta, held = _relaying(links=5)
    assert push.relay(delta, 1, 10.0) == []
    assert push.deadline() == 10.0 + limits.RELAY_DELAY_S
    push.known_to(delta.record_id, 2)
    held.add(delta.record_id)
    effects = push.arrived(delta.record_id)
    assert {e.link for e in effects} == {3, 4, 5}, "not to those who told us"
    assert all(e.message == msg.Records(((delta.data, True),)) for e in effects)
    assert push.arrived(delta.record_id) == push.wake(99.0) == [], "once"


def test_a_record_does_not_wait_long_for_its_payload():
    push, delta, _ = _relaying(links=2)
    push.relay(delta, 1, 10.0)
    assert push.wake(10.0 + limits.RELAY_DELAY_S / 2) == []
    (effect,) = push.wake(10.0 + limits.RELAY_DELAY_S)
    assert (effect.link, effect.message) == (2, msg.Records(((delta.data, False),)))
    assert push.deadline() == float("inf")


def test_so_many_records_wait_for_their_payloads_and_no_more():
    push, *_ = _relaying(links=2)
    for round_ in range(1, limits.IDS_PER_MESSAGE_MAX + 1):
        assert push.relay(builders.unsigned(1, round_), 1, 10.0) == []
    one_more = builders.unsigned(2, 1)
    assert push.relay(one_more, 1, 10.0) == [Send(2, msg.Records(((one_more.data, False),)))]


def test_a_record_that_was_voided_while_it_waited_is_not_passed_on():
    push, delta, _ = _relaying(links=2)
    push.relay(delta, 1, 10.0)
    push._ledger.drop(delta.author, 0)
    assert push.wake(10.0 + limits.RELAY_DELAY_S) == []
