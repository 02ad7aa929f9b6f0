"""When a node that has just started may train."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gossamer.protocol import limits
from gossamer.protocol.events import LinkUp
from gossamer.protocol.fetching.fetcher import Fetcher
from gossamer.protocol.gossip.announce import Announcer
from gossamer.protocol.gossip.anti_entropy import AntiEntropy
from gossamer.protocol.history.joining import CatchUp
from gossamer.protocol.membership.member_records import NodeInfo
from tests.protocol import builders
from tests.protocol.builders import identity

OWN = identity(0).node_id


class Beginner:
    """A node's catching up, and the machines that it watches."""

    def __init__(self, *, is_first: bool = False, signs: bool = True) -> None:
        info = NodeInfo(name="", trains=signs, incarnation=1, bootstrap=() if is_first else ("a:1",))
        context = replace(builders.context(), info=info)
        self.links, self.ledger = context.links, context.ledger
        self.anti_entropy = AntiEntropy(context, Announcer(context, set()))
        self.fetcher = Fetcher(lambda blob, size: None, context.rng)
        self.clock = SimpleNamespace(is_contradicted=False, read=lambda now: 0)
        self.catch_up = CatchUp(context, self.anti_entropy, self.fetcher.wants, cast(Any, self.clock))

    def hears_of(self, author: int, chunks: int, now: float) -> tuple[bytes, ...]:
        """A link says that it holds a delta's payload; returns the chunks."""
        blobs = tuple(f"{author}.{place}".encode() for place in range(chunks))
        delta = builders.unsigned(author, 1)
        self.ledger.add(delta)
        self.fetcher.want(delta.record_id, tuple((blob, 5) for blob in blobs), now)
        self.fetcher.hint(1, delta.record_id)
        return blobs

    def insists(self, now: float) -> None:
        """The link, no longer believed since it did not answer, says again that it holds everything."""
        self.fetcher.plan(now)
        for key in (*(delta.record_id for delta in self.ledger), b"root"):
            self.fetcher.hint(1, key)

    def is_done(self, now: float, *, has_signed: bool = False) -> bool:
        self.fetcher.plan(now)
        self.catch_up.observe(now)
        return self.catch_up.is_done(has_signed=has_signed)


@pytest.mark.parametrize("has_signed", [False, True])
def test_the_first_of_a_swarm_need_not_wait_until_somebody_comes(has_signed):
    node = Beginner(is_first=True)
    assert node.is_done(0.0, has_signed=has_signed)
    node.links.up(LinkUp(1, identity(1).node_id, False, None), 0.0)
    assert not node.is_done(0.0, has_signed=has_signed)


def test_a_joiner_waits_for_a_ledger_and_its_payloads_but_not_for_later_ones():
    node = Beginner()
    assert not node.is_done(10.0)
    node.fetcher.link_up(1, True)
    node.fetcher.want(b"early", ((b"chunk", 5),), 11.0)
    node.fetcher.hint(1, b"early")
    node.anti_entropy.synced_once = True
    assert not node.is_done(12.0)
    node.fetcher.want(b"late", ((b"other", 5),), 13.0)
    node.fetcher.hint(1, b"late")
    node.fetcher.arrived(b"chunk", 13.0)
    assert node.is_done(14.0)


@pytest.mark.parametrize(("honest", "is_minority"), [(3, True), (2, True), (1, False)])
def test_those_who_dribble_their_payloads_are_waited_for_only_where_they_are_most(honest, is_minority):
    """Half of the authors is as many as may: of two members, one of them hostile, nobody can tell which."""
    node = Beginner()
    node.fetcher.link_up(1, True)
    dribbled = [node.hears_of(author, 40, 1.0) for author in (1, 2)]
    served = [node.hears_of(author, 3, 1.0) for author in range(3, 3 + honest)]
    node.anti_entropy.synced_once = True
    assert not node.is_done(2.0)
    for blobs in served:
        for blob in blobs:
            node.fetcher.arrived(blob, 1.0)
    now = 3.0
    assert not node.is_done(now)
    for one, two in zip(*dribbled, strict=True):
        now += 1.0 + 0.7 * limits.STALL_PATIENCE_S
        node.insists(now)
        is_done = node.is_done(now)
        if is_done:
            break
        node.fetcher.arrived(one, now)
        node.fetcher.arrived(two, now)
    assert is_done == is_minority
    if is_minority:
        assert now < 3.0 + 2 * limits.MINORITY_PATIENCE_S


def test_payloads_of_which_nothing_comes_are_not_waited_for():
    """Whoever says again and again that it holds them may be a liar."""
    node = Beginner()
    node.fetcher.link_up(1, True)
    node.hears_of(1, 2, 1.0)
    node.anti_entropy.synced_once = True
    start = now = 2.0
    while not node.is_done(now) and now < start + 2 * limits.STALL_PATIENCE_S:
        now += 1.0
        node.insists(now)
    assert start + limits.STALL_PATIENCE_S < now < start + limits.STALL_PATIENCE_S + 5.0


def test_a_snapshot_under_way_is_nobodys_payload_and_waited_for():
    node = Beginner()
    node.fetcher.link_up(1, True)
    node.hears_of(1, 3, 1.0)
    for author in (2, 3):
        for blob in node.hears_of(author, 1, 1.0):
            node.fetcher.arrived(blob, 1.0)
    chunks = [f"s{place}".encode() for place in range(9)]
    node.fetcher.want(b"root", tuple((chunk, 5) for chunk in chunks), 1.0)
    node.fetcher.hint(1, b"root")
    node.anti_entropy.synced_once = True
    now = 2.0
    for chunk in chunks:
        node.insists(now)
        assert not node.is_done(now)
        node.fetcher.arrived(chunk, now)
        now += 0.9 * limits.STALL_PATIENCE_S


def test_a_joiner_that_finds_nobody_waits_on():
    node = Beginner()
    assert not node.is_done(0.0)
    assert not node.is_done(1e6)


def test_who_has_signed_waits_for_a_ledger_or_for_a_while():
    node = Beginner()
    assert not node.is_done(50.0, has_signed=True)
    assert not node.is_done(50.0 + limits.RESUME_PATIENCE_S, has_signed=True)
    assert node.is_done(50.1 + limits.RESUME_PATIENCE_S, has_signed=True)
    node = Beginner()
    node.anti_entropy.synced_once = True
    node.fetcher.want(b"early", ((b"chunk", 5),), 50.0)
    assert node.is_done(51.0, has_signed=True), "payloads can come later"


def test_who_signs_nothing_waits_for_others_only_for_a_while():
    node = Beginner(signs=False)
    assert not node.is_done(50.0)
    assert not node.is_done(50.0 + limits.RESUME_PATIENCE_S)
    assert node.is_done(50.1 + limits.RESUME_PATIENCE_S)
    node.links.up(LinkUp(1, identity(1).node_id, False, None), 90.0)
    assert not node.is_done(90.0), "somebody is there to learn from"
    node.links.down(1)
    assert not node.is_done(90.0 + limits.RESUME_PATIENCE_S), "a link that breaks may come again"
    assert node.is_done(90.1 + limits.RESUME_PATIENCE_S)


def test_what_was_refused_for_a_wrong_clock_is_asked_for_again_once_it_is_right():
    node = Beginner()
    node.clock.is_contradicted = True
    assert not node.is_done(10.0)
    node.anti_entropy.synced_once = True  # an exchange in which all was refused
    assert not node.is_done(11.0)
    node.clock.is_contradicted = False
    assert not node.is_done(12.0)
    assert not node.anti_entropy.synced_once
    node.anti_entropy.synced_once = True
    assert node.is_done(13.0)


def test_payloads_of_what_was_refused_are_waited_for_as_those_that_came_at_once_are():
    """How long nothing had come of the others by then says nothing of these."""
    node = Beginner()
    node.fetcher.link_up(1, True)
    node.hears_of(1, 2, 1.0)
    node.anti_entropy.synced_once = True
    for now in (1.0, 3.0, 5.0):
        assert not node.is_done(now)
    node.clock.is_contradicted = True
    now = 7.0
    assert not node.is_done(now)
    node.clock.is_contradicted = False
    now += 2 * limits.STALL_PATIENCE_S
    assert not node.is_done(now)
    refused = [blob for author in (2, 3, 4) for blob in node.hears_of(author, 9, now)]
    node.anti_entropy.synced_once = True
    for blob in refused:
        now += 2.0
        node.insists(now)
        assert not node.is_done(now)
        node.fetcher.arrived(blob, now)


def test_a_clock_that_stays_wrong_is_not_waited_for_for_ever():
    node = Beginner()
    node.anti_entropy.synced_once = node.clock.is_contradicted = True
    now = 10.0
    assert not node.is_done(now)
    assert not node.is_done(now + limits.CLOCK_PATIENCE_S)
    node.is_done(now + limits.CLOCK_PATIENCE_S + 1.0)
    node.anti_entropy.synced_once = True
    assert node.is_done(now + limits.CLOCK_PATIENCE_S + 2.0)
