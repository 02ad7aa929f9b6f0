"""Promised payloads: whoever was promised one is told once, unless it has it by then."""

from __future__ import annotations

from gossamer.protocol import limits
from gossamer.protocol.effects import Effect, Send
from gossamer.protocol.gossip.announce import Offers
from gossamer.protocol.messages import Have, HaveChunks

A, B = b"a" * 32, b"b" * 32


def _told(effects: list[Effect]) -> dict[int, tuple[bytes, ...]]:
    told: dict[int, tuple[bytes, ...]] = {}
    for effect in effects:
        assert isinstance(effect, Send)
        assert isinstance(effect.message, Have)
        assert effect.link not in told, "one message a link"
        told[effect.link] = effect.message.record_ids
    return told


def test_promises_are_kept_once_and_in_one_message():
    offers = Offers()
    for link in (1, 2):
        offers.promise(A, link)
    offers.promise(B, 2)
    assert offers.deadline() == float("inf")
    offers.complete(A, 10.0)
    offers.complete(B, 10.01)
    assert offers.deadline() == 10.0 + limits.OFFER_DELAY_S
    assert offers.wake(10.01) == []
    assert _told(offers.wake(offers.deadline())) == {1: (A,), 2: (A, B)}
    assert offers.deadline() == float("inf")
    offers.complete(A, 20.0)
    assert _told(offers.wake(21.0)) == {}


def test_whoever_has_it_is_not_told():
    offers = Offers()
    for link in (1, 2, 3):
        offers.promise(A, link)
    offers.heard(A, 1)
    offers.complete(A, 0.0)
    offers.heard(A, 2)
    offers.heard(B, 3)
    assert _told(offers.wake(1.0)) == {3: (A,)}


def test_what_is_gone_is_forgotten():
    offers = Offers()
    for record_id in (A, B):
        for link in (1, 2):
            offers.promise(record_id, link)
    offers.forget(A)
    offers.link_down(1)
    offers.complete(A, 0.0)
    offers.complete(B, 0.0)
    assert _told(offers.wake(1.0)) == {2: (B,)}
    assert not offers._waiting


def test_parts_are_offered_sooner_and_not_to_those_who_have_them():
    offers = Offers()
    offers.promise(B, 3)
    offers.complete(B, 0.0)
    for place in (4, 0):
        offers.part(A, place, {1, 2, 3}, 0.0)
    offers.part(A, 5, set(), 0.0)
    offers.heard_part(A, 0, 2)
    offers.heard_part(B, 0, 2)
    offers.link_down(1)
    assert offers.deadline() == limits.PART_DELAY_S
    parts = {
        effect.link: effect.message
        for effect in offers.wake(limits.PART_DELAY_S)
        if isinstance(effect.message, HaveChunks)
    }
    assert parts == {2: HaveChunks(A, (4,)), 3: HaveChunks(A, (4, 0))}
    assert offers.wake(1.0) == []


def test_many_are_cut_into_messages():
    offers = Offers()
    ids = [number.to_bytes(32, "big") for number in range(limits.IDS_PER_MESSAGE_MAX + 1)]
    for record_id in ids:
        offers.promise(record_id, 1)
        offers.complete(record_id, 0.0)
    sizes = [len(effect.message.record_ids) for effect in offers.wake(1.0)]
    assert sizes == [limits.IDS_PER_MESSAGE_MAX, 1]
