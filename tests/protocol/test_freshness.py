"""What a node states of its windows: how long they took, and how late others' deltas were merged."""

from __future__ import annotations

import numpy as np
import pytest

from gossamer.protocol.ledger import Ledger
from gossamer.protocol.merge.freshness import NOTHING_STATED, Freshness
from gossamer.protocol.records import Delta
from tests.protocol import builders

OWN, OTHERS = builders.identity(0), [builders.identity(n) for n in (1, 2, 3)]


class Node:
    """A node that publishes a round a second for a model in one fragment."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.freshness = Freshness(self.ledger, OWN.node_id, 1)

    def hears(self, round_: int, *authors: int) -> list[Delta]:
        """The records of others for a round come."""
        rng = np.random.default_rng(round_)
        found = [builders.random_delta(rng, OTHERS[n], round_)[0] for n in authors]
        for delta in found:
            self.ledger.add(delta)
        return found


@pytest.fixture
def node() -> Node:
    return Node()


def test_the_first_window_of_a_run_states_nothing(node):
    assert node.freshness.stated(1, 10.0) == NOTHING_STATED


@pytest.mark.parametrize(
    ("merged", "late"),
    [
        ([(10.1, 1), (10.3, 2), (10.8, 3)], 300),
        ([(10.1, 1), (10.8, 3)], 800),
        ([(10.05, 3)], 50),
        ([(10.1, 1)], 1000),
        ([], 1000),
    ],
    ids=["half at 0.3", "half at 0.8", "all at once", "less than half", "none"],
)
def test_how_late_half_of_the_others_are_merged(node, merged, late):
    deltas = node.hears(1, 0, 1, 2)
    node.freshness.published(1, 10.0)
    for when, count in merged:
        node.freshness.merged(1, deltas[:count], 250, when)
    stated = node.freshness.stated(2, 11.0)
    assert (stated.took, stated.late) == (1000, late)
    assert stated.agreement == (250 if merged else 1000), "nothing to compare is no disagreement"


def test_as_many_are_expected_as_the_last_time(node):
    """On a line that is too slow, not even the records have come when the window ends."""
    for round_ in (1, 2):
        node.freshness.published(round_, 10.0 + round_)
        if round_ == 1:
            node.hears(1, 0, 1, 2)
    assert node.freshness.stated(3, 13.0).late == 1000


def test_who_is_alone_misses_nothing(node):
    node.freshness.published(1, 10.0)
    assert node.freshness.stated(2, 12.0)[:2] == (2000, 0)
