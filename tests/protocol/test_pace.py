"""The pace: nobody waits, nobody runs away, and a liar moves nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol.errors import PayloadError
from gossamer.protocol.limits import CLOCK_SKEW_S, ROUND_SLACK
from gossamer.protocol.manifest import PaceSection
from gossamer.protocol.pace import (
    BEGIN,
    BEGIN_STEPS,
    MAX_STEPS,
    MIN_STEPS,
    RECENT,
    Observation,
    Pace,
    PaceFold,
    PaceState,
    advance,
    is_plausible,
    observe,
    round_clock,
    turn_for,
)
from gossamer.protocol.records import Delta
from gossamer.protocol.sampling import EVERY_ROUND, is_drawn
from tests.protocol import builders

STEPS = Pace(PaceSection(every_steps=30, min_round_seconds=0.05), 1)
SECONDS = Pace(PaceSection(every_steps=0, every_seconds=10.0), 1)


def clock_of(rounds: Sequence[int]) -> int:
    return round_clock([(round_, bytes([node])) for node, round_ in enumerate(rounds)])


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
    assert clock_of(rounds) == clock
    assert clock_of(list(reversed(rounds))) == clock


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
        due = pace.due(last[node], clock_of(last), steps[node], now - since[node])
        if due is not None:
            assert due > last[node], "a round is signed once"
            last[node], since[node] = due, now
            published[node][due] = steps[node]
            steps[node] = 0
        assert max(last) <= clock_of(last) + 1, "nobody is more than a round ahead of the clock"
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


# --- The length of a window, as the swarm sets it.

SECTION = PaceSection()
OURS = builders.manifest(pace={})
EVERY = OURS.history.snapshot_every


def seen(late: int, kbit_s: int = 0, agreement: int = 500) -> Observation:
    return Observation(4, late, agreement, kbit_s, 4)


def run(epochs: Iterable[Observation], section: PaceSection = SECTION) -> list[int]:
    """The window of each epoch after the first two."""
    state, lengths = BEGIN, []
    for one in epochs:
        state = advance(state, one, section)
        lengths.append(state.lengths[1])
    return lengths


def epoch(number: int, *members: tuple[int, int, int]) -> list[Delta]:
    """An epoch's deltas: each member states how long windows took, how late merges were, how they agreed."""
    return [
        Delta(
            record_id=bytes([author]) * 32,
            author=bytes([author]) * 32,
            body=builders.body_of(b"x", "int8", round_, 2, took=took, late=late, agreement=agreement),
            data=b"",
        )
        for round_ in range(number * EVERY + 1, (number + 1) * EVERY + 1)
        for author, (took, late, agreement) in enumerate(members)
    ]


def test_windows_are_as_short_as_merges_are_early():
    assert run([seen(0)] * 9)[-1] == MIN_STEPS
    assert run([seen(500)] * 9)[-1] == BEGIN_STEPS
    assert run([seen(1000)] * 40)[-1] == MAX_STEPS
    assert run([seen(1000)]) == [2 * BEGIN_STEPS], "how much longer it should be cannot be known"


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(0, 10_000))
def test_a_window_stays_within_its_bounds_and_its_state_comes_back(lates, kbit_s):
    state = BEGIN
    for late in lates:
        state = advance(state, seen(late, kbit_s), PaceSection(max_mbit=1.0))
        assert all(MIN_STEPS <= length <= MAX_STEPS for length in state.lengths)
        assert PaceState.unpack(state.pack()) == state


def test_a_line_that_comes_and_goes_every_epoch_does_not_make_windows_swing():
    """Merges take 3 steps' time, or 12."""
    state, lengths = BEGIN, []
    for number in range(40):
        late = (3, 12)[number % 2]
        state = advance(state, seen(min(1000, 1000 * late // state.lengths[0])), SECTION)
        lengths.append(state.lengths[1])
    assert set(lengths[2 * RECENT :]) == {24}, "what the slow line wants"


def test_a_line_that_changes_for_good_is_followed_both_ways():
    state, lengths = BEGIN, []
    for late in [3] * 12 + [60] * 12 + [3] * 12:
        state = advance(state, seen(min(1000, 1000 * late // state.lengths[0])), SECTION)
        lengths.append(state.lengths[1])
    assert lengths[11] == 6 and lengths[35] <= 7
    assert 100 <= lengths[23] <= 130


def test_a_budget_makes_windows_as_long_as_it_wants():
    state = BEGIN
    for _ in range(12):
        state = advance(state, seen(0, 40_000 // state.lengths[0]), PaceSection(max_mbit=1.0))
    assert state.lengths[1] == 40


def test_deltas_of_long_windows_that_have_nothing_in_common_are_made_more_often():
    state = BEGIN._replace(lengths=(120, 120), wishes=(120,) * RECENT)
    agreeing = disagreeing = state
    for _ in range(RECENT):
        agreeing = advance(agreeing, seen(500), SECTION)
        disagreeing = advance(disagreeing, seen(500, agreement=0), SECTION)
    assert agreeing.lengths[1] == 120 and disagreeing.lengths[1] == 60


FRESH, LATE = (1000, 100, 400), (1000, 1000, 400)


@pytest.mark.parametrize("members", [3, 4, 5, 8])
def test_one_slow_member_does_not_lengthen_everybodys_windows(members):
    assert observe(epoch(0, *[FRESH] * (members - 1), LATE), OURS).late == 100


def test_of_two_members_the_one_worse_off_counts():
    assert observe(epoch(0, FRESH, LATE), OURS).late == 1000


@given(
    honest=st.lists(st.integers(0, 1000), min_size=3, max_size=9),
    lies=st.lists(st.sampled_from([0, 1000]), max_size=3),
)
def test_a_quarter_of_liars_moves_nothing_beyond_what_the_others_state(honest, lies):
    lies = lies[: len(honest) // 3]
    stated = [(1000, late, 300) for late in (*honest, *lies)]
    found = observe(epoch(0, *stated), OURS).late
    assert min(honest) <= found <= max(honest)


@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 5000)), min_size=2, max_size=4), st.randoms())
def test_the_pace_follows_from_the_set_in_whatever_order_it_came_and_from_any_base(stated, random):
    """One node merged all of it in another order, and one joined in the middle."""
    rounds: dict[int, tuple[Delta, ...]] = {}
    for number in range(5):
        for delta in epoch(number, *[(took, min(took, late * (number + 1)), 300) for took, late in stated]):
            rounds[delta.round] = (*rounds.get(delta.round, ()), delta)
    end = 5 * EVERY
    once = PaceFold(OURS).as_of(end, 0, BEGIN, rounds)
    late, held = PaceFold(OURS), {}
    for round_ in random.sample(sorted(rounds), len(rounds)):
        held[round_] = rounds[round_][::-1]
        late.changed(round_)
        late.as_of(end, 0, BEGIN, held)
    assert late.as_of(end, 0, BEGIN, held) == once
    floor = 2 * EVERY
    base = late.as_of(floor, 0, BEGIN, held)
    above = {round_: deltas for round_, deltas in rounds.items() if round_ > floor}
    assert PaceFold(OURS).as_of(end, floor, PaceState.unpack(base.pack()), above) == once


def test_what_a_liar_puts_into_a_snapshot_is_no_pace():
    for data in (b"", bytes(8), BEGIN.pack()[:-1], b"\xff" * 8):
        with pytest.raises(PayloadError):
            PaceState.unpack(data)


# --- Turns: who contributes to a round of a large swarm.

FEW = builders.manifest(pace={"contributors": 8})
IDS = [sha256(bytes([number])).digest() for number in range(200)]


def crowd(number: int, members: Sequence[bytes], turn: int) -> list[Delta]:
    """An epoch's deltas of members who contribute when it is their turn."""
    return [
        Delta(
            record_id=sha256(author + bytes([round_])).digest(),
            author=author,
            body=builders.body_of(b"x", "int8", round_, 2, turn=turn),
            data=b"",
        )
        for round_ in range(number * EVERY + 1, (number + 1) * EVERY + 1)
        for author in members
        if is_drawn(author, round_, turn)
    ]


def turns(epochs: Iterable[Iterable[Delta]]) -> list[int]:
    """The turn that each epoch leads to, in rounds."""
    state, found = BEGIN, []
    for deltas in epochs:
        state = advance(state, observe(deltas, FEW), FEW.pace)
        assert PaceState.unpack(state.pack()) == state
        found.append(state.turns[1] / EVERY_ROUND)
    return found


def test_as_many_contribute_as_the_manifest_says_however_many_there_are():
    """Two epochs after 8, 40 and 200 members have come, and again after most have left."""
    turn, found = [EVERY_ROUND] * 2, []
    for number, size in enumerate([8, 8, 40, 40, 40, 200, 200, 200, 32, 32, 32, 32]):
        deltas = crowd(number, IDS[:size], turn[number])
        turn.append(turn_for(observe(deltas, FEW).publishers, FEW.pace))
        found.append(len(deltas) / EVERY)
    assert found[:2] == [8, 8] and found[2:4] == [40, 40] and found[5] > 30
    for settled in (found[4], *found[7:8], *found[10:]):
        assert settled == pytest.approx(8, abs=3)
    assert turn_for(200, PaceSection(contributors=0)) == turn_for(8, FEW.pace) == EVERY_ROUND


def test_sides_of_a_partition_add_up_when_it_heals():
    """Each side of 100 has come to a turn of its own; the merged records still say 200."""
    halves = [
        [*crowd(n, IDS[:100], 12 * EVERY_ROUND), *crowd(n, IDS[100:], 12 * EVERY_ROUND)] for n in (0, 1)
    ]
    assert turns(halves) == pytest.approx([25, 25], rel=0.3)


def test_few_who_state_another_turn_count_for_little():
    honest = crowd(0, IDS[:190], 20 * EVERY_ROUND)
    always, never = crowd(0, IDS[190:192], EVERY_ROUND), crowd(0, IDS[192:], 1000 * EVERY_ROUND)
    [usual], [found] = turns([honest]), turns([[*honest, *always, *never]])
    assert usual <= found < 1.4 * usual


def test_a_round_goes_on_without_those_whose_turn_it_is():
    """Of 200 members 3 are left, and their turn comes once in 25 rounds."""
    pace = [Pace(PaceSection(every_steps=5, contributors=8), 1, node_id) for node_id in IDS[:3]]
    turn, last, seen_clock, since = turn_for(200, FEW.pace), [0] * 3, 0, 0
    for step in range(1, 2000):
        clock = round_clock(zip(last, IDS, strict=False), turn=turn)
        if clock != seen_clock:
            seen_clock, since = clock, step
        for node in range(3):
            if (due := pace[node].due(last[node], clock, step - since, 1e9, turn=turn)) is not None:
                assert is_drawn(IDS[node], due, turn) and due <= 1 + step // 5
                last[node] = due
    assert clock > 0.8 * 2000 / 5, "rounds of nobody take no longer than others"


def test_rounds_from_before_a_turn_count_whoever_is_drawn_now():
    """Else the clock would be 0 where nobody's last round is one of its turn, and nobody would go on."""
    of_16 = turn_for(16, PaceSection(contributors=3))
    last = next(r for r in range(1, 1000) if not any(is_drawn(node_id, r, of_16) for node_id in IDS[:16]))
    latest = [(last, node_id) for node_id in IDS[:16]]
    assert round_clock(latest, turn=of_16) == 0
    assert round_clock(latest, turn=of_16, since=last) == last


def test_liars_race_the_clock_only_where_it_is_their_turn():
    turn = turn_for(200, PaceSection())
    honest = [
        (max(r for r in range(1, 101) if is_drawn(node_id, r, turn) or r == 1), node_id) for node_id in IDS
    ]
    clock = round_clock(honest, turn=turn)
    assert clock >= 98
    for far in range(101, 160):
        raced = [(far, node_id) for node_id in IDS[:40]] + honest[40:]
        assert round_clock(raced, turn=turn) <= 100
