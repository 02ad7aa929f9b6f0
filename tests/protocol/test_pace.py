"""The pace: nobody waits, nobody runs away, and a liar moves nothing."""

from __future__ import annotations

import pytest

from gossamer.protocol.limits import CLOCK_SKEW_S, ROUND_SLACK
from gossamer.protocol.manifest import PaceSection
from gossamer.protocol.pace import Pace, is_plausible, round_clock
from tests.protocol import builders

STEPS = Pace(PaceSection(every_steps=30, min_round_seconds=0.05), 1)
SECONDS = Pace(PaceSection(every_steps=0, every_seconds=10.0), 1)


@pytest.mark.parametrize(
    ("rounds", "clock"),
    [
        ([], 0),
        ([7], 7),
        ([7, 3], 7),
        ([9, 7, 3], 7),
        ([9, 9, 7, 3], 9),
        ([100, 9, 7, 3], 9),
        ([100, 9, 8, 7, 6, 5], 8),
        ([100, 99, 8, 7, 6, 5], 8),
        ([0, 0, 0, 5], 0),
    ],
)
def test_clock_leaves_out_the_top_third(rounds, clock):
    assert round_clock(rounds) == clock
    assert round_clock(reversed(rounds)) == clock


@pytest.mark.parametrize(
    ("own_last", "clock", "steps", "expected"),
    [
        (0, 0, 29, None),
        (0, 0, 30, 1),
        (5, 5, 29, None),
        (5, 5, 30, 6),
        (5, 5, 1000, 6),
        (6, 5, 1000, None),  # a round ahead: the others have to move first
        (7, 5, 1000, None),
        (5, 6, 1, 6),  # the clock has reached it: at once, however short the window
        (5, 6, 0, None),  # but not without a step
        (5, 9, 1, 9),  # and a round that went by is skipped
        (0, 9, 1, 9),
        (3, 500, 1, 500),
    ],
)
def test_due_by_steps(own_last, clock, steps, expected):
    assert STEPS.due(own_last, clock, steps, 60.0) == expected


@pytest.mark.parametrize(("seconds", "expected"), [(9.9, None), (10.0, 6)])
def test_due_by_seconds(seconds, expected):
    assert SECONDS.due(5, 5, 3, seconds) == expected
    assert SECONDS.due(5, 5, 0, seconds) is None


def test_fragments_take_turns_within_a_window():
    pace = Pace(PaceSection(every_steps=30), 3)
    assert pace.due(5, 5, 9, 60.0) is None
    assert pace.due(5, 5, 10, 60.0) == 6
    by_time = Pace(PaceSection(every_steps=0, every_seconds=9.0), 3)
    assert by_time.due(5, 5, 1, 2.9) is None
    assert by_time.due(5, 5, 1, 3.0) == 6


def test_whoever_opens_a_round_keeps_the_minimum_length():
    assert STEPS.due(5, 5, 30, 0.04) is None
    assert STEPS.due(5, 5, 30, 0.05) == 6
    assert STEPS.due(5, 6, 30, 0.0) == 6  # it is open already


def _simulate(
    step_s: list[float], pace: Pace, until_s: float
) -> tuple[list[int], list[dict[int, int]], float]:
    """Nodes with these step times that see each other at once: last rounds, steps by round, time a round."""
    last = [0] * len(step_s)
    since = [0.0] * len(step_s)
    steps = [0] * len(step_s)
    published: list[dict[int, int]] = [{} for _ in step_s]
    next_at = list(step_s)
    while min(next_at) < until_s:
        node = min(range(len(step_s)), key=lambda n: (next_at[n], n))
        now = next_at[node]
        next_at[node] += step_s[node]
        steps[node] += 1
        due = pace.due(last[node], round_clock(last), steps[node], now - since[node])
        if due is not None:
            assert due > last[node], "a round is signed once"
            last[node], since[node] = due, now
            published[node][due] = steps[node]
            steps[node] = 0
        assert max(last) <= round_clock(last) + 1, "nobody is more than a round ahead of the clock"
    return last, published, until_s / max(last)


def test_nodes_of_different_speed_line_up_by_themselves():
    """Speeds 1, 1/2, 1/4 and one that needs 20 windows for a step."""
    last, published, _ = _simulate([0.1, 0.2, 0.4, 60.0], STEPS, 600.0)
    assert max(last[:3]) - min(last[:3]) <= 1
    assert len(published[2]) > 0.9 * max(last)
    mean = [sum(p.values()) / len(p) for p in published]
    assert mean[0] == pytest.approx(4 * mean[2], rel=0.2)
    assert len(published[3]) >= 5, "one that cannot finish a step in a round skips rounds and still counts"


def test_rounds_never_outrun_what_others_find_plausible():
    """However fast the machines, a swarm's own rounds stay within the manifest's minimum round length."""
    fast = Pace(PaceSection(every_steps=1, min_round_seconds=0.05), 1)
    last, _, _ = _simulate([0.001, 0.0013, 0.002], fast, 30.0)
    assert 400 <= max(last) <= 600 + 1
    last, _, _ = _simulate([0.001], fast, 30.0)
    assert max(last) <= 600


def test_plausibility():
    manifest = builders.manifest(pace={"min_round_seconds": 2.0})
    created = manifest.swarm.created
    reached = int((1000 + CLOCK_SKEW_S) / 2.0) + ROUND_SLACK
    assert is_plausible(reached, manifest, created + 1000.0)
    assert not is_plausible(reached + 1, manifest, created + 1000.0)
    assert is_plausible(1, manifest, created)
    assert not is_plausible(1, manifest, created - 10_000.0)
    tiny = builders.manifest(pace={"min_round_seconds": 5e-324})
    assert is_plausible(2**31 - 1, tiny, created + 1000.0)
