"""What a node signs of its own, and what it refuses to sign."""

from __future__ import annotations

import math
import random

import pytest

from gossamer.protocol.access.acl import AccessList
from gossamer.protocol.effects import Notice, Ready, Store
from gossamer.protocol.fetching.fetcher import Fetcher
from gossamer.protocol.gossip.announce import Author, Holdings, Offers
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.membership.links import Links
from gossamer.protocol.membership.members import Roster
from gossamer.protocol.records import NO_RECORD, DeltaBody
from tests.protocol import builders

OWN = builders.identity(0)
LAYOUT = builders.SMALL.plan()


class Writer:
    """An author with a ledger of its own."""

    def __init__(self, of=builders.SMALL) -> None:
        rng = random.Random(0)
        self.ledger = Ledger()
        links = Links(OWN.node_id, Roster(OWN.node_id), (), rng)
        self.holdings = Holdings(
            self.ledger, Roster(b""), links, Fetcher(lambda blob, size: None, rng), Offers(), rng
        )
        acl = AccessList(of.admission, of.swarm_id)
        self.author = Author(OWN, of.swarm_id, LAYOUT, acl, self.ledger, self.holdings)


def body(round_: int, **changes: object) -> DeltaBody:
    return builders.body_of(b"payload", "int8", round_, len(LAYOUT.fragments), **changes)


def test_a_delta_counts_once_it_is_stored_and_names_the_one_before():
    writer = Writer()
    (first,) = writer.author.publish(body(1))
    assert isinstance(first, Store) and first.own
    assert len(writer.ledger) == 0
    assert first.delta.body.previous == NO_RECORD
    assert writer.author.stored(first.delta) == [Ready(first.delta)]
    assert writer.holdings.holds(first.delta.record_id)
    (second,) = writer.author.publish(body(2))
    assert isinstance(second, Store)
    assert second.delta.body.previous == first.delta.record_id


def test_no_round_is_signed_twice_stored_or_not():
    writer = Writer()
    assert isinstance(writer.author.publish(body(5))[0], Store)
    for round_ in (5, 4):
        assert isinstance(writer.author.publish(body(round_))[0], Notice)
    writer = Writer()
    writer.author.restore([3, 7, 2])
    assert writer.author.has_signed and writer.author.last_round == 7
    assert isinstance(writer.author.publish(body(7))[0], Notice)
    assert isinstance(writer.author.publish(body(8))[0], Store)


def test_nothing_is_signed_for_a_round_that_is_closed():
    """A full disk kept it back for longer than rounds are: nobody would take it. The next one is signed."""
    writer = Writer()
    writer.ledger.close(8)
    for round_ in (7, 8):
        (notice,) = writer.author.publish(body(round_))
        assert isinstance(notice, Notice) and "closed" in notice.text
    assert writer.author.last_round == 8
    assert isinstance(writer.author.publish(body(9))[0], Store)


def test_a_copy_of_our_disk_need_not_know_all_that_we_signed():
    writer = Writer()
    writer.author.restore([3], is_copy=True)
    assert writer.author.last_round == 3 and not writer.author.has_signed


def test_what_others_tell_of_us_was_signed_by_us():
    writer = Writer()
    writer.ledger.note_last(OWN.node_id, 9, bytes(32))
    assert writer.author.last_round == 9 and not writer.author.has_signed
    assert isinstance(writer.author.publish(body(9))[0], Notice)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_what_nobody_would_take_is_not_signed(loss):
    writer = Writer()
    assert isinstance(writer.author.publish(body(1, loss=loss))[0], Notice)
    assert writer.author.last_round == 0


def test_who_may_not_train_signs_nothing():
    writer = Writer(builders.manifest(admission=builders.admission()))
    assert isinstance(writer.author.publish(body(1))[0], Notice)
    assert writer.author.last_round == 0


def test_a_delta_is_spread_once_somebody_else_holds_it():
    writer = Writer()
    assert writer.author.last_is_spread, "there is nothing to lose"
    (store,) = writer.author.publish(body(1))
    writer.author.stored(store.delta)
    writer.author.heard([bytes(32)])
    assert not writer.author.last_is_spread
    writer.author.heard([bytes(32), store.delta.record_id])
    writer.author.heard([])
    assert writer.author.last_is_spread


def test_nobody_waits_for_others_to_take_what_does_not_count_any_more():
    writer = Writer()
    (store,) = writer.author.publish(body(1))
    writer.author.stored(store.delta)
    assert not writer.author.last_is_spread
    writer.ledger.close(1)
    assert writer.author.last_is_spread
