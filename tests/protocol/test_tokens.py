"""Tokens count as they weigh, and what is far more than usual waits for others."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.node.daemon.storage.records import GENESIS, Base, Rounds
from gossamer.protocol.limits import TOKENS_MAX
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.merge.merge import OUTLIER_TIMES, USUAL_ROUNDS, TokenCount, UsualRates
from gossamer.protocol.records import Delta
from tests.protocol import builders
from tests.protocol.builders import manifest
from tests.protocol.builders import unsigned as delta

EVERY = 4
SWARM = manifest(fragments=1, history={"snapshot_every": EVERY, "seal_after": 1, "retain": 8})
"""Its weights are capped at 4 times the median, and a staleness over 16 weighs nothing."""

FRIENDS = manifest(fragments=1, history={"snapshot_every": EVERY}, outer={"weight_cap": 0.0})

LIAR = 9


def count(*deltas: Delta, of: Manifest = SWARM) -> int:
    return TokenCount(of, deltas).total


def by_round(deltas: Iterable[Delta]) -> Rounds:
    rounds: dict[int, tuple[Delta, ...]] = {}
    for each in deltas:
        rounds[each.round] = (*rounds.get(each.round, ()), each)
    return rounds


def test_honest_members_count_for_what_they_state() -> None:
    alone = [delta(1, round_, tokens=100 * round_) for round_ in range(1, 9)]
    assert count(*alone) == 3600
    uneven = [delta(author, round_, tokens=1000 * author) for author in (1, 2, 3, 4) for round_ in (1, 2, 6)]
    assert count(*uneven) == 30_000
    now_and_then = [*(delta(1, round_, tokens=1000) for round_ in range(1, 5)), delta(2, 4, tokens=400)]
    assert count(*now_and_then) == 4400, "who publishes more often is not cut for that"


@pytest.mark.parametrize("round_", [3, 4], ids=["beside another", "alone in its round"])
def test_no_member_counts_for_more_than_so_many_times_the_usual(round_: int) -> None:
    honest = [delta(author, number, tokens=1000) for author in (1, 2) for number in (1, 2, 3)]
    assert count(*honest, delta(LIAR, round_, tokens=TOKENS_MAX)) == 6000 + 4000


def test_who_publishes_more_often_has_no_more_say() -> None:
    often = [delta(LIAR, round_, tokens=TOKENS_MAX) for round_ in (1, 2, 3, 4)]
    assert count(*often, delta(1, 2, tokens=1000)) == 4 * 4000 + 1000


def test_what_weighs_nothing_does_not_count() -> None:
    honest = delta(1, 101, tokens=1000)
    assert count(honest, delta(LIAR, 101, base=101 - 18, tokens=TOKENS_MAX)) == 1000
    assert count(honest, delta(2, 101, base=101 - 17, tokens=1000)) == 2000


def test_machines_of_friends_may_differ_a_thousandfold() -> None:
    assert count(delta(1, 1, tokens=10**6), delta(2, 1, tokens=10**3), of=FRIENDS) == 1_001_000


def test_a_count_below_one_delta() -> None:
    few = manifest(fragments=1, outer={"weight_cap": 0.001})
    assert count(delta(1, 1, tokens=999), of=few) == 0
    most = manifest(fragments=1, outer={"weight_cap": 1e308})
    assert count(delta(1, 1, tokens=1000), delta(2, 1, tokens=TOKENS_MAX), of=most) == TOKENS_MAX + 1000


@st.composite
def records(draw: st.DrawFn) -> list[Delta]:
    """Of up to five members in up to 16 rounds, no two of one member in one round."""
    keys = draw(st.sets(st.tuples(st.integers(1, 5), st.integers(1, 16)), max_size=24))
    tokens = st.sampled_from((1, 999, 1000, 7000, TOKENS_MAX))
    return [
        delta(author, round_, base=round_ - draw(st.sampled_from((1, 17, 18))), tokens=draw(tokens))
        for author, round_ in sorted(keys)
    ]


@given(records(), records(), st.randoms(use_true_random=False), st.sampled_from((SWARM, FRIENDS)))
def test_any_order_and_whatever_came_and_went_give_the_same(
    kept: list[Delta], gone: list[Delta], rng, swarm: Manifest
) -> None:
    held = {(each.author, each.round) for each in kept}
    gone = [each for each in gone if (each.author, each.round) not in held]
    arriving = [*kept, *gone]
    rng.shuffle(arriving)
    found = TokenCount(swarm)
    for each in arriving:
        found.change((), [each])
    for each in gone:
        found.change([each], ())
    assert found.total == count(*kept, of=swarm)


@given(records(), st.sampled_from((SWARM, FRIENDS)))
def test_the_claim_for_a_round_is_the_same_wherever_closed_history_ends(
    held: list[Delta], swarm: Manifest
) -> None:
    """On a node that keeps all, one that closes step by step, and one that joined from any snapshot."""
    ends = range(0, 17, EVERY)
    claims = {end: count(*(each for each in held if each.round <= end), of=swarm) for end in ends}
    stepwise = GENESIS
    for floor in ends:
        joined = Base(floor, bytes(32), claims[floor])
        closing = by_round(each for each in held if stepwise.round < each.round <= floor)
        stepwise = Base(floor, bytes(32), stepwise.tokens_with(closing, swarm))
        for end in ends[floor // EVERY :]:
            rest = by_round(each for each in held if floor < each.round <= end)
            assert joined.tokens_with(rest, swarm) == stepwise.tokens_with(rest, swarm) == claims[end]


def test_what_is_usual_just_now_is_what_others_state() -> None:
    found = TokenCount(SWARM, [delta(author, 1, tokens=1000 * author) for author in (1, 2, 3)])
    ids = {author: delta(author, 1).author for author in (1, 2, 3, LIAR)}
    assert found.usual(but={ids[LIAR]}) == 2000.0
    assert found.usual(but={ids[3], ids[2]}) == 1000.0
    assert found.usual(but=set(ids.values())) == float("inf")
    found.change((), [delta(1, EVERY * n + 1, tokens=10) for n in range(1, 4)])
    assert found.usual(but={ids[LIAR]}) == 2000.0
    found.change((), [delta(1, EVERY * 4 + 1, tokens=10)])
    assert found.usual(but={ids[LIAR]}) == 10.0, "that was long ago"


def test_what_is_gone_does_not_hide_what_is_usual() -> None:
    """Somebody's deltas of rounds far ahead, that are void by now."""
    found = TokenCount(SWARM, [delta(1, 1, tokens=1000)])
    gone = [delta(LIAR, EVERY * number + 1, tokens=10) for number in range(5, 15)]
    found.change((), gone)
    found.change(gone, ())
    assert found.usual(but=()) == 1000.0


OWN, OTHER, THIRD = (bytes([number]) * 32 for number in range(3))
FRAGMENT = builders.several_tensors([10, 10])


def moved(author: bytes, *norms: float, steps: int = 4) -> Any:
    return SimpleNamespace(author=author, norms=norms, steps=steps)


def test_of_a_delta_that_was_alone_only_our_own_shows_what_is_usual() -> None:
    """Whoever had a round to itself could make anything usual."""
    usual = UsualRates(OWN)
    for contributions in ([], [moved(OTHER, 1.0, 1.0)]):
        usual.note(1, FRAGMENT, contributions)
        assert not usual.are_known(FRAGMENT)
    usual.note(2, FRAGMENT, [moved(OWN, 1.0, 1.0)])
    assert usual.are_known(FRAGMENT)
    usual.note(3, FRAGMENT, [moved(OTHER, 100.0, 100.0)])
    assert usual.are_all_exceeded(FRAGMENT, [moved(THIRD, 100.0, 100.0)])


def test_what_is_far_more_than_usual_in_one_tensor_is_an_outlier_for_its_steps() -> None:
    usual = UsualRates(OWN)
    usual.note(1, FRAGMENT, [moved(OWN, 1.0, 2.0), moved(OTHER, 1.0, 2.0)])
    within, beyond = 0.9 * OUTLIER_TIMES, 1.1 * OUTLIER_TIMES
    assert not usual.are_all_exceeded(FRAGMENT, [moved(THIRD, within, 2 * within)])
    assert usual.are_all_exceeded(FRAGMENT, [moved(THIRD, 1.0, 2 * beyond)])
    assert not usual.are_all_exceeded(FRAGMENT, [moved(THIRD, 1.0, 2 * beyond, steps=16)]), "twice as far"
    assert not usual.are_all_exceeded(FRAGMENT, [moved(THIRD, 1.0, 2 * beyond), moved(OTHER, 1.0, 2.0)])


def test_only_the_last_rounds_show_what_is_usual() -> None:
    usual, far = UsualRates(OWN), [moved(THIRD, 2 * OUTLIER_TIMES, 1.0)]
    usual.note(1, FRAGMENT, [moved(OWN, 10.0, 1.0)])
    for round_ in range(2, 1 + USUAL_ROUNDS):
        usual.note(round_, FRAGMENT, [moved(OWN, 1.0, 1.0)])
        assert not usual.are_all_exceeded(FRAGMENT, far), "the first is among them"
    usual.note(1 + USUAL_ROUNDS, FRAGMENT, [moved(OWN, 1.0, 1.0)])
    assert usual.are_all_exceeded(FRAGMENT, far)


def test_of_a_tensor_that_has_not_moved_yet_nothing_is_unusual() -> None:
    usual = UsualRates(OWN)
    usual.note(1, FRAGMENT, [moved(OWN, 1.0, 0.0)])
    assert not usual.are_all_exceeded(FRAGMENT, [moved(THIRD, 1.0, 1e9)])
