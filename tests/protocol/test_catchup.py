"""When a node that has just started may train."""

from __future__ import annotations

import random

import pytest

from gossamer.protocol import limits
from gossamer.protocol.catchup import CatchUp
from gossamer.protocol.effects import LinkUp
from gossamer.protocol.fetch import Fetcher
from gossamer.protocol.gossip import Gossip
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.links import Links
from gossamer.protocol.roster import Roster
from tests.protocol.builders import identity

OWN = identity(0).node_id


class Beginner:
    """A node's catching up, and the machines that it watches."""

    def __init__(self, *, is_first: bool = False) -> None:
        rng = random.Random(0)
        self.links = Links(OWN, Roster(OWN), (), rng)
        self.gossip = Gossip(Ledger(), lambda record_id: False, rng)
        self.fetcher = Fetcher(lambda blob: False, rng)
        self.catch_up = CatchUp(self.links, self.gossip, self.fetcher, is_first=is_first)

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
    node.gossip.synced_once = True
    assert not node.is_done(12.0)
    node.fetcher.want(b"late", ((b"other", 5),), 13.0)
    node.fetcher.hint(1, b"late")
    node.fetcher.arrived(b"chunk")
    assert node.is_done(14.0)


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
    node.gossip.synced_once = True
    node.fetcher.want(b"early", ((b"chunk", 5),), 50.0)
    assert node.is_done(51.0, has_signed=True), "payloads can come later"
