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


@pytest.mark.parametrize(
    ("alike", "members", "is_agreed"),
    [(2, 9, False), (3, 9, True), (2, 3, True), (1, 3, False), (1, 1, True), (1, 2, False), (2, 2, True)],
)
def test_three_members_are_enough_or_most_of_fewer(alike, members, is_agreed):
    assert agreed([claim(16)] * alike, members) == (claim(16) if is_agreed else None)


def test_the_newest_agreed_claim_counts():
    claims = [claim(16)] * 3 + [claim(32)] * 3 + [claim(48)] * 2
    assert agreed(claims, members=5) == claim(32)


def members(*claims: Claim) -> list[tuple[Claim, ...]]:
    """Members that make one claim each."""
    return [(one,) for one in claims]


OURS, THEIRS = claim(16, tokens=100, mark=1), claim(16, tokens=200, mark=2)
LIGHTER, ALIKE = THEIRS._replace(tokens=50), THEIRS._replace(tokens=100)
LIE, BEFORE = claim(16, tokens=2**59, mark=7), claim(14)
JUNK = [claim(16, tokens=1, mark=mark) for mark in (8, 9, 10)]
LONGEST = claim(16, tokens=300, mark=3)


@pytest.mark.parametrize(
    ("ours", "others", "winner"),
    [
        (OURS, members(OURS, OURS, LIE), None),
        (OURS, [*members(OURS, OURS, OURS), *[(LIE, *JUNK)] * 3], None),
        (LIE, [*members(OURS, OURS, OURS, OURS), *[(LIE, *JUNK)] * 2], OURS),
        (OURS, members(LIGHTER, LIGHTER, LIGHTER), LIGHTER),
        (LIGHTER, members(LIGHTER, LIGHTER, OURS, OURS), None),
        (OURS, members(OURS, THEIRS, THEIRS), THEIRS),
        (THEIRS, members(THEIRS, OURS, OURS), None),
        (OURS, members(ALIKE), ALIKE),
        (ALIKE, members(OURS), None),
        (OURS, members(*[claim(32, tokens=900, mark=3)] * 5), None),
        (LONGEST, members(OURS, OURS, THEIRS), OURS),
        (THEIRS, members(OURS, OURS, LONGEST), OURS),
        (OURS, members(OURS, THEIRS, LONGEST), None),
        (OURS, members(LIE, BEFORE), None),
        (OURS, members(LIE, LIE, *[BEFORE] * 6), None),
        (OURS, [(LIE, BEFORE._replace(tokens=2**59)), (BEFORE, claim(12))], None),
        (OURS, [(THEIRS,), (), ()], THEIRS),
        (OURS, members(*[THEIRS] * 3, *[BEFORE] * 2), THEIRS),
        (OURS, members(*[THEIRS] * 3, *[BEFORE] * 3), None),
    ],
    ids=[
        "a lone liar wins no contest against three",
        "nor do three that lie alike against most",
        "most win against them",
        "what most stand behind wins whatever its tokens",
        "and stays",
        "more tokens win between two halves",
        "and stay",
        "exactly one side of a tie yields",
        "and the other does not",
        "claims of other rounds take no part",
        "of three histories the one that some share wins whatever the tokens",
        "against the second, too",
        "and stays",
        "a liar about a round that nobody else claims yet",
        "two such",
        "whatever else it claims",
        "who has nothing to claim yet holds up no contest",
        "three win over two who may yet claim ours",
        "and not over three",
    ],
)
def test_which_claim_wins(ours, others, winner):
    assert winning_claim(ours, others) == winner


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
