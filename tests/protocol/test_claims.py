"""Sealing arithmetic, agreement and the contest of lineages."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol.history.claims import (
    agreed,
    chain,
    closable_round,
    genesis_claim,
    round_digest,
    roundest,
    sealed_round,
    total,
    winning_claim,
)
from gossamer.protocol.limits import TOKENS_TOTAL_MAX
from gossamer.protocol.manifest import HistorySection
from gossamer.protocol.records import Claim
from tests.protocol.histories import claim

SECTION = HistorySection(seal_after=8, snapshot_every=16, retain=64)


@pytest.mark.parametrize(("clock", "due"), [(0, 0), (23, 0), (24, 16), (39, 16), (40, 32), (1000, 992)])
def test_a_snapshot_is_due_seal_after_rounds_behind_the_clock(clock, due):
    assert sealed_round(clock, SECTION) == due


@given(clock=st.integers(0, 10_000), agreed_round=st.integers(0, 10_000))
def test_nothing_is_closed_that_is_young_or_not_agreed(clock, agreed_round):
    floor = closable_round(agreed_round, clock, SECTION)
    assert floor <= agreed_round
    assert floor == 0 or floor <= clock - SECTION.retain


def test_retain_of_zero_keeps_everything():
    section = HistorySection(seal_after=1, snapshot_every=1, retain=0)
    assert closable_round(5000, 10_000, section) == 0


def test_three_witnesses_are_enough_and_two_are_not():
    assert agreed([claim(16)] * 2, members=9) is None
    assert agreed([claim(16)] * 3, members=9) == claim(16)


def test_of_fewer_members_most_are_enough():
    assert agreed([claim(16)] * 2, members=3) == claim(16)
    assert agreed([claim(16)], members=3) is None
    assert agreed([claim(16)], members=1) == claim(16)
    assert agreed([claim(16)], members=2) is None
    assert agreed([claim(16)] * 2, members=2) == claim(16)


def test_the_newest_agreed_claim_counts():
    claims = [claim(16)] * 3 + [claim(32)] * 3 + [claim(48)] * 2
    assert agreed(claims, members=5) == claim(32)


def members(*claims: Claim) -> list[tuple[Claim, ...]]:
    """Members that make one claim each."""
    return [(one,) for one in claims]


def test_a_lone_liar_wins_no_contest_against_three():
    own = claim(16, tokens=100)
    liar = claim(16, tokens=10**9, mark=7)
    assert winning_claim(own, members(own, own, liar)) is None


def test_three_that_lie_alike_win_no_contest_against_most():
    own, lie = claim(16, tokens=100), claim(16, tokens=10**9, mark=7)
    junk = [claim(16, tokens=1, mark=mark) for mark in (8, 9, 10)]
    assert winning_claim(own, [*members(own, own, own), *[(lie, *junk)] * 3]) is None
    assert winning_claim(lie, [*members(own, own, own, own), *[(lie, *junk)] * 2]) == own


def test_the_lineage_that_most_stand_behind_wins_whatever_its_tokens():
    ours, theirs = claim(16, tokens=200, mark=1), claim(16, tokens=100, mark=2)
    assert winning_claim(ours, members(ours, theirs, theirs, theirs)) == theirs
    assert winning_claim(theirs, members(theirs, theirs, ours, ours)) is None


def test_the_lineage_with_more_tokens_wins_between_two_halves():
    ours, theirs = claim(16, tokens=100, mark=1), claim(16, tokens=200, mark=2)
    assert winning_claim(ours, members(ours, theirs, theirs)) == theirs
    assert winning_claim(theirs, members(theirs, ours, ours)) is None


def test_exactly_one_side_of_a_tie_yields():
    ours, theirs = claim(16, tokens=100, mark=1), claim(16, tokens=100, mark=2)
    assert winning_claim(ours, members(theirs)) == theirs
    assert winning_claim(theirs, members(ours)) is None


@given(st.lists(st.integers(0, 2), min_size=2, max_size=9))
def test_not_all_sides_yield_and_those_that_do_yield_to_one(sides):
    """Each member judges by its own claim and the others'."""
    claims = [claim(16, tokens=100 + side, mark=1 + side) for side in sides]
    yielded = {
        own: winning_claim(own, members(*claims[:place], *claims[place + 1 :]))
        for place, own in enumerate(claims)
    }
    winners = {winner for winner in yielded.values() if winner is not None}
    assert len(winners) <= 1
    assert all(yielded[winner] is None for winner in winners)


def test_claims_of_other_rounds_take_no_part():
    assert winning_claim(claim(16, tokens=1), members(*[claim(32, tokens=9, mark=3)] * 5)) is None


def test_of_three_histories_the_one_that_some_share_wins_whatever_the_others_tokens():
    shared, long, longest = (
        claim(22, tokens=3, mark=1),
        claim(22, tokens=4, mark=2),
        claim(22, tokens=5, mark=3),
    )
    assert winning_claim(longest, members(shared, shared, long)) == shared
    assert winning_claim(long, members(shared, shared, longest)) == shared
    assert winning_claim(shared, members(shared, long, longest)) is None


def test_a_liar_about_a_round_that_no_one_else_claims_yet_wins_no_contest():
    """Just after we sealed it, say: those who still claim the round before have not spoken against us."""
    own, lie = claim(18, tokens=100), claim(18, tokens=2**59, mark=7)
    before = claim(16, tokens=90)
    assert winning_claim(own, members(lie, before)) is None
    assert winning_claim(own, members(lie, *[before] * 6)) is None
    assert winning_claim(own, members(lie, lie, *[before] * 6)) is None
    assert winning_claim(own, [(lie, claim(16, tokens=2**59, mark=7)), (before, claim(14))]) is None


def test_who_has_nothing_to_claim_yet_holds_up_no_contest():
    ours, theirs = claim(16, tokens=100, mark=1), claim(16, tokens=200, mark=2)
    assert winning_claim(ours, [(theirs,), (), ()]) == theirs


def test_three_that_stand_behind_a_claim_win_over_no_more_than_three_who_may_yet_claim_ours():
    ours, theirs = claim(16, tokens=100, mark=1), claim(16, tokens=110, mark=2)
    assert winning_claim(ours, members(*[theirs] * 3, *[claim(14)] * 2)) == theirs
    assert winning_claim(ours, members(*[theirs] * 3, *[claim(14)] * 3)) is None


@given(st.integers(1, 9), st.integers(0, 9), st.integers(1, 9), st.sampled_from((1, 2**59)))
def test_fewer_than_half_win_no_contest_by_their_tokens(own, silent, liars, tokens):
    """Against those who claim as we do, ourselves among them, and those who may yet."""
    ours, lie = claim(16, tokens=100, mark=1), claim(16, tokens=tokens, mark=2)
    winner = winning_claim(ours, members(*[ours] * (own - 1), *[claim(14)] * silent, *[lie] * liars))
    if liars < own + silent:
        assert winner is None


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=6, unique=True), st.randoms())
def test_round_digest_is_of_a_set(ids, random):
    shuffled = list(ids)
    random.shuffle(shuffled)
    assert round_digest(shuffled) == round_digest(ids)
    assert round_digest(ids) != round_digest(ids[1:])


def test_chain_depends_on_every_link():
    start = genesis_claim(bytes(32)).digest
    one = chain(chain(start, 1, b"a" * 32), 2, b"b" * 32)
    assert one != chain(chain(start, 2, b"a" * 32), 3, b"b" * 32)
    assert one != chain(chain(start, 1, b"b" * 32), 2, b"a" * 32)


def test_retain_must_reach_past_the_next_snapshot():
    with pytest.raises(ValueError, match="retain must be 0, or at least"):
        HistorySection(seal_after=8, snapshot_every=16, retain=20)


@pytest.mark.parametrize(
    ("last", "newest", "every", "expected"),
    [
        (0, 8, 8, 8),
        (8, 15, 8, None),
        (8, 16, 8, 16),
        (6, 13, 1, 8),
        (8, 20, 1, 16),
        (18, 25, 1, 24),
        (16, 27, 1, 24),
        (24, 60, 4, 32),
        (12, 13, 1, 13),
    ],
)
def test_members_pass_the_same_snapshots_over(last, newest, every, expected):
    assert roundest(last, newest, every) == expected


def test_members_who_look_at_different_moments_take_snapshots_of_the_same_rounds():
    """Every seven rounds, each at another one."""
    taken = []
    for phase in range(7):
        last, rounds = 0, set()
        for newest in range(phase, 400, 7):
            target = roundest(last, newest, 1)
            if target is not None:
                last = target
                rounds.add(target)
        taken.append(rounds)
    common = set.intersection(*taken)
    assert all(common & set(range(start, start + 16)) for start in range(16, 380, 16))


@given(st.lists(st.integers(0, 2**63 - 1), max_size=6), st.integers(0, 6))
def test_tokens_come_to_the_same_in_whatever_parts_they_are_added_up(tokens, place):
    """Those of closed rounds are a number by themselves, and nodes close at different times."""
    assert total([total(tokens[:place]), *tokens[place:]]) == total(tokens)
    assert total(tokens) == min(sum(tokens), TOKENS_TOTAL_MAX) < 2**63
