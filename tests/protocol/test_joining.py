"""Whom a joiner believes: members that disagree, liars alone and together, and the user's word."""

import random
from dataclasses import replace

import pytest

from gossamer.protocol import limits
from gossamer.protocol.claims import Claim
from gossamer.protocol.effects import Outbox
from gossamer.protocol.history.joining import REMIND_S, Joining, believable
from gossamer.protocol.history.peer_claims import PeerClaim
from gossamer.protocol.membership.member_records import NodeInfo
from tests.protocol import builders


def claim(round_: int, mark: int = 1) -> Claim:
    return Claim(round_, round_ * 10, bytes([mark]) * 32, bytes([mark]) * 32)


TRUE, OLDER, NEWER = claim(16), claim(8), claim(24)
LIE, FAR_LIE = claim(16, mark=9), claim(1000, mark=9)


def honest(count: int, *claims: Claim) -> list[PeerClaim]:
    return [PeerClaim(claims or (TRUE, OLDER), bytes([1, number])) for number in range(count)]


def liars(count: int, *claims: Claim) -> list[PeerClaim]:
    return [PeerClaim(claims or (LIE,), bytes([9, number])) for number in range(count)]


def joiner(*trusted: bytes) -> tuple[Joining, Outbox]:
    info = NodeInfo(name="", trains=True, incarnation=1, trusted=trusted)
    context = replace(builders.context(), info=info)
    return Joining(context), context.outbox


def told_of(witness: PeerClaim) -> PeerClaim:
    return witness._replace(is_named=True)


def test_two_honest_members_outvote_one_liar():
    assert believable([*honest(2), *liars(1)]) == TRUE


@pytest.mark.parametrize("lie", [LIE, FAR_LIE], ids=["about our round", "about one far ahead"])
def test_three_liars_move_no_joiner_of_a_larger_swarm(lie):
    assert believable([*honest(5), *liars(3, lie)]) == TRUE


def test_of_two_halves_nobody_can_tell():
    assert believable([*honest(3, TRUE), *liars(3)]) is None


def test_what_two_halves_do_not_dispute_is_believed():
    assert believable([*honest(3), *liars(2), *honest(1, OLDER)]) == OLDER


def test_the_newest_that_most_members_make_is_chosen_while_a_snapshot_is_being_written():
    assert believable([*honest(3, NEWER, TRUE), *honest(2, TRUE, OLDER)]) == NEWER
    assert believable([*honest(2, NEWER, TRUE), *honest(3, TRUE, OLDER)]) == TRUE


def test_without_a_majority_the_most_common_claim_that_nothing_contradicts_is_chosen():
    members = [*honest(4, TRUE), *honest(3, OLDER), *liars(3, FAR_LIE)]
    assert believable(members) == TRUE


def test_who_was_named_is_believed_before_any_number_of_names():
    named, *others = honest(3)
    assert believable([told_of(named), *others, *liars(100, LIE, FAR_LIE)]) == TRUE


def test_of_two_members_the_one_that_was_named_is_believed():
    assert believable([*map(told_of, honest(1)), *liars(1)]) == TRUE


def test_a_named_liar_is_not_believed_alone_nor_is_anybody_else():
    """It may be the honest one among many names: only the user can tell."""
    members = [*honest(5), *map(told_of, liars(1, LIE, claim(8, mark=9)))]
    assert believable(members, patient=True) is None
    assert believable(members) is None


@pytest.mark.parametrize("lie", [LIE, FAR_LIE], ids=["about our round", "about one far ahead"])
def test_of_two_named_members_the_one_with_whom_more_agree_is_believed(lie):
    """One of the join addresses is a liar's, which has friends: the newest claim won, with most tokens."""
    lie = lie._replace(tokens=2**59)
    members = [*map(told_of, honest(1)), *honest(5)[1:], *map(told_of, liars(1, lie)), *liars(4, lie)[1:]]
    assert believable(members, patient=True) == TRUE
    ahead = [
        *map(told_of, [*honest(1, NEWER, TRUE), *honest(2, TRUE, OLDER)[1:]]),
        *honest(5, NEWER, TRUE)[2:],
    ]
    assert believable(ahead) == TRUE, "which all of them have"


def test_a_named_member_that_is_behind_is_waited_for_and_no_longer_than_that():
    members = [*honest(5), told_of(PeerClaim((claim(0),), b"founder without its disk"))]
    assert believable(members, patient=True) is None
    assert believable(members) == TRUE


def test_believing_does_not_depend_on_the_order_of_members(seed):
    rng = random.Random(seed)
    claims = [TRUE, LIE, OLDER, NEWER, FAR_LIE]
    for _ in range(200):
        members = [
            PeerClaim(tuple(rng.sample(claims, rng.randrange(1, 4))), bytes([n]), rng.random() < 0.2)
            for n in range(rng.randrange(1, 9))
        ]
        best = believable(members)
        assert best is None or any(best in member.claims for member in members)
        assert believable(rng.sample(members, len(members))) == best


def test_the_users_word_is_enough_and_nobody_elses_is():
    joining, outbox = joiner(bytes([1, 0]))
    joining.choose(liars(5), 100.0)
    assert joining.choose(liars(5), 100.0 + limits.ROSTER_PATIENCE_S) is None
    assert "--trust" in outbox[0].text
    assert joining.choose([*liars(5), *honest(1)], 110.0) == TRUE


def test_where_only_the_users_word_counts_nothing_is_fetched_for_anybody_elses():
    """Not even in case it turns out to be believed."""
    joining, _ = joiner(bytes([1, 0]))
    joining.prefetch(liars(5), 0.0)
    assert joining.prefetch(liars(5), limits.PREFETCH_AFTER_S) is None
    assert joining.prefetch([*liars(5), *honest(1)], limits.PREFETCH_AFTER_S) == TRUE


def test_a_joiner_says_who_contradicts_whom_and_not_too_often():
    joining, outbox = joiner()
    members = [*map(told_of, honest(1, TRUE)), *liars(6)]
    assert not any(joining.choose(members, 100.0 + second) for second in range(40))
    texts = [effect.text for effect in outbox]
    assert len(texts) == -(-(40 - limits.ROSTER_PATIENCE_S) // REMIND_S)
    assert "contradict each other about round 16" in texts[0]
    assert f"and 2 more; others: {members[0].node_id.hex()} (at a join address)" in texts[0]
    assert "--trust NODE_ID" in texts[0]


def test_members_that_are_merely_at_different_rounds_do_not_contradict_each_other():
    joining, outbox = joiner()
    members = [*honest(2, TRUE), *honest(2, OLDER)]
    joining.choose(members, 100.0)
    joining.choose(members, 103.0)
    assert [each.text for each in outbox] == ["waiting for 4 members to agree on a snapshot to start from"]


@pytest.mark.parametrize("alike", [1, 3])
def test_any_number_of_rival_claims_is_looked_at_once_each(alike):
    """A thousand made-up names with four claims each took a joiner's whole processor, or a second in each
    reminder."""
    compared = 0

    class Counted(Claim):
        __slots__ = ()
        __hash__ = Claim.__hash__

        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return tuple(self) == tuple(other)

        def __ne__(self, other):
            return not self == other

    lies = [Counted(16, 0, number.to_bytes(32, "big"), bytes(32)) for number in range(400)]
    names = [
        PeerClaim(tuple(lies[first : first + 4]), bytes([first // 4, name]))
        for first in range(0, len(lies), 4)
        for name in range(alike)
    ]
    joining, outbox = joiner()
    joining.choose(names, 0.0)
    assert believable(names) is None
    assert joining.choose(names, limits.NAMED_PATIENCE_S) is None
    assert "contradict each other" in outbox[0].text
    assert compared < 20 * len(names) * 4
