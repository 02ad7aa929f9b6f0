"""Forks: whose claims count, which history yields, when, and what is waited for before."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from gossamer.protocol import limits
from gossamer.protocol.effects import Adopt, Notice, Seal
from gossamer.protocol.history.claims import PeerClaim, PeerClaims, genesis_claim
from gossamer.protocol.history.forks import DIFFERENCE_KEPT_S
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.membership.members import Health, Roster
from gossamer.protocol.records import Claim, MemberRecord
from tests.protocol import builders
from tests.protocol.histories import Told, claim, drive, joined, kinds


def test_a_snapshot_that_cannot_be_does_not_hold_our_own_history_up():
    """Though those who claim it are most, and go on claiming it."""
    sealing = joined(claim(8))
    sealing._away.looks_until = 0.0
    lie = claim(8, tokens=5, mark=9)
    others = [(lie,)] * 3
    assert kinds(drive(sealing, 0.0, 2 * limits.FORK_PATIENCE_S, clock=10, others=others), Adopt) == [
        Adopt(lie)
    ]
    sealing.unusable(claim(16))
    assert sealing.adopting == lie, "that was another one"
    sealing.unusable(lie._replace(tokens=6))
    assert sealing.adopting is None
    others = [(claim(8, tokens=5, mark=10),)] * 3
    since = 2 * limits.FORK_PATIENCE_S + 6
    found = drive(sealing, since, limits.FORK_PATIENCE_S - 1, clock=20, others=others)
    assert kinds(found, Seal) == [Seal(16)]
    assert not kinds(found, Adopt), "what comes after it has to last as long"


@pytest.mark.parametrize("says", [False, True])
def test_a_lone_liar_that_waits_for_its_moments_wins_no_contest(says):
    """The others come to our round each time, or to the next, when the liar is silent or goes on."""
    ours, lie, old = claim(16, tokens=5), claim(16, tokens=2**59, mark=7), claim(8)
    answer = [(old,), (ours,), (ours,), *[(lie,)] * says]
    sealing = joined(ours)
    for start in range(0, 2 * 300, 40):
        assert not kinds(drive(sealing, start, 20.0, clock=16, others=[(lie,), (old,), (old,)]), Adopt)
        assert not kinds(drive(sealing, start + 20, 20.0, clock=16, others=answer), Adopt)


LIE = claim(16, tokens=2**59, mark=7)
RIVAL = claim(16, tokens=9, mark=2)


@pytest.mark.parametrize(
    ("ours", "others", "seconds"),
    [
        (claim(16, tokens=5), [*[(LIE,)] * 3, *[(claim(8),)] * 4], 660),
        (claim(16, tokens=5), [*[(LIE,)] * 3, *[(claim(24),)] * 4], 660),
        (claim(16, tokens=9), [(claim(16, tokens=5, mark=2),)], 60),
        (claim(16, tokens=9), [(claim(16, tokens=5, mark=2),)] * 5, 25),
    ],
    ids=[
        "three liars about a round that most, who are behind, do not claim",
        "three liars about a round that most have left behind",
        "the heavier history",
        "a record that takes its time around a ring: 20 s where links die as it is published",
    ],
)
def test_our_history_stays(ours, others, seconds):
    assert not kinds(drive(joined(ours), 0.0, seconds, clock=16, others=others), Adopt)


def two_rounds(mark=1, tokens=5):
    """A node that claims two rounds, with the other node's claims of them, which have more tokens."""
    ours = claim(16, tokens, mark), claim(8, tokens, mark)
    sealing = joined(ours[1])
    sealing.sealed(ours)
    return sealing, ours, (claim(16, tokens + 4, mark + 1), claim(8, tokens + 4, mark + 1))


def test_a_difference_about_a_round_before_the_newest_is_one_too():
    """Those who are behind, and rest, never claim our newest round."""
    sealing, _, (_, theirs) = two_rounds()
    found = drive(sealing, 0.0, limits.FORK_PATIENCE_S + 3, clock=16, others=[(theirs,)] * 3)
    assert kinds(found, Adopt) == [Adopt(theirs)]


def test_who_shares_our_newest_claim_stands_by_all_that_came_before():
    sealing, ours, (_, theirs) = two_rounds()
    others = [ours[:1]] * 2 + [(theirs,)] * 2
    assert not kinds(drive(sealing, 0.0, 60, clock=16, others=others), Adopt), "three of five"
    found = drive(sealing, 61.0, 60, clock=16, others=[*others, (theirs,)])
    assert kinds(found, Adopt) == [Adopt(theirs)], "three of six, with more tokens"


def test_a_snapshot_that_a_late_record_has_outdated_contradicts_nobody_who_shares_the_next():
    sealing, ours, (_, outdated) = two_rounds()
    others = [(ours[0], outdated)] * 5
    assert not kinds(drive(sealing, 0.0, 60, clock=16, others=others), Adopt)


def test_a_late_record_leaves_what_we_claimed_of_closed_rounds():
    theirs = claim(8, tokens=9, mark=2)
    for floor, is_known in ((0, False), (8, True)):
        sealing, ours, _ = two_rounds()
        sealing.sealing.floor = floor
        sealing.sealed((ours[0]._replace(tokens=6, digest=bytes(32)),))
        found = drive(sealing, 0.0, limits.FORK_PATIENCE_S + 3, clock=16, others=[(theirs,)] * 3)
        assert kinds(found, Adopt) == [Adopt(theirs)] * is_known


@pytest.mark.parametrize(
    ("said", "adopts"),
    [
        (lambda now: Told([PeerClaim((RIVAL,), said_at=now)] * 3), True),
        (lambda now: Told([PeerClaim((RIVAL,), said_at=min(now, 3.0))] * 3), False),
        (lambda now: Told([PeerClaim((claim(16, tokens=4, mark=3),))], heard=[(RIVAL,)] * 3), False),
        (lambda now: Told([PeerClaim((RIVAL,))] * 5, heard=[]), False),
    ],
    ids=[
        "members go on saying it",
        "we are cut off, and their records are from before they could know what we have published",
        "those who made the claim are gone: there is nobody to fetch it from",
        "node ids without deltas have no voice",
    ],
)
def test_only_what_contributors_still_say_counts(said, adopts):
    sealing = joined(claim(16, tokens=5))
    ticks = [tick / 2 for tick in range(200)]
    effects = [effect for now in ticks for effect in sealing.wake(now, 16, said(now))]
    assert kinds(effects, Adopt) == [Adopt(RIVAL)] * adopts


def test_a_difference_is_no_fork_while_payloads_are_missing_but_they_are_waited_for_only_a_while():
    sealing = joined(claim(16, tokens=5, mark=1))
    others = [(RIVAL,)] * 3
    patience = limits.FORK_MINORITY_PATIENCE_S
    assert not kinds(drive(sealing, 0.0, patience - 10, clock=16, others=others, lacking=16), Adopt)
    assert kinds(drive(sealing, patience, 5, clock=16, others=others, lacking=16), Adopt)


def test_payloads_of_later_rounds_explain_no_difference():
    sealing = joined(claim(16, tokens=5, mark=1))
    patience = limits.FORK_PATIENCE_S + 3
    assert kinds(drive(sealing, 0.0, patience, clock=16, others=[(RIVAL,)] * 3, lacking=17), Adopt)


def test_a_difference_that_shows_now_and_then_is_one_all_the_same():
    """With fast rounds members have seldom sealed the very round that we have."""
    sealing = joined(claim(16, tokens=5, mark=1))
    effects = []
    for period in range(int(limits.FORK_PATIENCE_S) // 8 + 2):
        for start, claimed in ((0.0, RIVAL), (4.0, claim(24, tokens=12, mark=2))):
            effects += drive(sealing, period * 8.0 + start, 3.0, clock=16, others=[(claimed,)] * 3)
    assert kinds(effects, Adopt) == [Adopt(RIVAL)]


@pytest.mark.parametrize("some_differ", [True, False])
def test_a_difference_that_members_of_our_round_end_begins_anew(some_differ):
    sealing, patience = joined(claim(16, tokens=5, mark=1)), limits.FORK_PATIENCE_S
    differs = [(RIVAL,)] * 3
    agrees = [(claim(16, tokens=5, mark=1),)] * 3 + differs[:some_differ]
    effects = drive(sealing, 0.0, patience - 5, clock=16, others=differs)
    effects += drive(sealing, patience - 4, 2.0, clock=16, others=agrees)
    effects += drive(sealing, patience - 1, patience - 5, clock=16, others=differs)
    assert not kinds(effects, Adopt)


def test_a_difference_from_long_ago_is_a_new_one():
    sealing = joined(claim(16, tokens=5, mark=1))
    differs = [(RIVAL,)] * 3
    effects = drive(sealing, 0.0, 3.0, clock=16, others=differs)
    effects += drive(sealing, 3.5, 2 * DIFFERENCE_KEPT_S, clock=16, others=[])
    effects += drive(sealing, 4.0 + 2 * DIFFERENCE_KEPT_S, 3.0, clock=16, others=differs)
    assert not kinds(effects, Adopt)


def yields(sealing, start, seconds):
    """Others claim another thing than we do for our round, each time anew."""
    times = []
    for tick in range(int(seconds)):
        own = sealing.claims[0]
        other = own._replace(root=bytes([own.root[0] % 250 + 1]) * 32)
        found = kinds(sealing.wake(start + tick, 16, Told([PeerClaim((other,))] * 3)), Adopt)
        if found:
            times.append(start + tick)
            sealing.adopted(other)
            sealing.sealed((other,))
    return times


def test_a_history_is_given_up_seven_times_an_hour_at_most_and_after_sixteen_minutes_at_the_latest():
    """As docs/threat-model.md says: so often can one key have a node fetch what differs."""
    start = 3 * limits.FORK_MEMORY_S
    times = yields(joined(claim(16, tokens=5)), start, 3 * 3600)
    assert max(sum(first <= time < first + 3600.0 for time in times) for first in times) == 7
    assert 950.0 < max(later - earlier for earlier, later in pairwise(times)) < 16 * 60 + 10


def ahead():
    """One that has closed rounds up to 96, which the others have not reached."""
    return joined(claim(112, mark=9), claim(104, mark=9), floor=96, own_last=115)


def at(round_, claims, node_id, said_at=float("inf")):
    return PeerClaim(claims, node_id, said_at=said_at, round=round_)


SLOW = [at(38 - n, (claim(32), claim(24)), bytes([n])) for n in range(4)]
LIAR = at(5, (claim(0, mark=7),), b"liar")
BESIDE = at(117, (claim(112, mark=9),), b"fast too")
STARTED = at(0, (claim(32),), b"just started")


def look(sealing, members, seconds=60, authors=0, start=0.0):
    effects = []
    for tick in range(2 * seconds):
        effects += sealing.wake(start + tick / 2, 112, Told(members, known=authors))
    return effects


def test_who_has_closed_what_most_members_are_at_begins_anew_where_they_are():
    """It was cut off, and went by its own fast clock."""
    sealing = ahead()
    members = [*SLOW, BESIDE]
    assert not look(sealing, members, int(limits.FORK_PATIENCE_S) - 1, authors=5)
    effects = look(sealing, members, authors=5)
    assert kinds(effects, Adopt) == [Adopt(claim(32))]
    (notice,) = kinds(effects, Notice)
    assert "A FORK" in notice.text and "we publish again in 77 rounds" in notice.text
    sealing.adopted(claim(32))
    sealing.sealed((claim(32),))
    assert sealing.floor == 32
    assert not kinds(drive(sealing, 70.0, 20, clock=39, others=[(claim(32), claim(24))] * 4), Adopt)


def test_who_has_begun_anew_where_most_members_are_takes_its_time_to_give_that_up_too():
    sealing = ahead()
    (adopt,) = kinds(look(sealing, SLOW), Adopt)
    sealing.adopted(adopt.claim)
    sealing.sealed((adopt.claim,))
    others = [(claim(32, tokens=9, mark=2),)] * 3
    twice = 2 * limits.FORK_PATIENCE_S
    assert not kinds(drive(sealing, 60.0, twice - 5, clock=36, others=others), Adopt)
    assert kinds(drive(sealing, 60.0 + twice, 5, clock=36, others=others), Adopt)


@pytest.mark.parametrize("claims", [(claim(24),), (claim(112, mark=9),)], ids=["theirs", "ours"])
def test_who_does_not_train_counts_on_neither_side(claims):
    """A bootstrap peer would else keep two that train from being more than one that had run ahead."""
    looks_on = PeerClaim(claims, b"bootstrap", trains=False)
    assert kinds(look(ahead(), [*SLOW[:2], looks_on], authors=2), Adopt) == [Adopt(claim(32))]
    assert not kinds(look(ahead(), [SLOW[0], looks_on], authors=2), Adopt)


@pytest.mark.parametrize(
    ("members", "authors"),
    [
        ([LIAR], 3),
        ([LIAR, LIAR._replace(node_id=b"another"), *[BESIDE] * 4], 6),
        ([LIAR, LIAR._replace(node_id=b"another"), *[STARTED] * 4], 6),
        ([LIAR, LIAR._replace(node_id=b"another")], 6),
        ([STARTED] * 4, 4),
        ([member._replace(said_at=-100.0) for member in SLOW], 4),
        ([member._replace(claims=(claim(104, mark=9),)) for member in SLOW], 4),
    ],
    ids=[
        "one liar",
        "a third that lies",
        "a third that lies as the others start again",
        "a third that lies as the others are gone",
        "nobody has published since it came",
        "what was said long ago",
        "their rows are late, and they have our history",
    ],
)
def test_nothing_less_takes_it_back(members, authors):
    assert not kinds(look(ahead(), members, authors=authors), Adopt)


def peers(*rows: MemberRecord, genesis: Claim, ledger: Ledger, named: Collection[bytes] = ()) -> PeerClaims:
    links = SimpleNamespace(given_ids=lambda: named)
    manifest = SimpleNamespace(genesis=SimpleNamespace(root=genesis.root))
    context: Any = SimpleNamespace(ledger=ledger, roster=Roster(b""), links=links, manifest=manifest)
    for row in rows:
        context.roster.update(row, 0.0)
    return PeerClaims(context, SimpleNamespace())  # type: ignore[arg-type]


def said(of: PeerClaims, *rows: MemberRecord) -> list[PeerClaim]:
    return [next(one for one in of.members() if one.node_id == row.node_id) for row in rows]


def test_no_claim_of_another_beginning_than_the_manifests_counts() -> None:
    genesis, later = genesis_claim(bytes(32)), Claim(8, 1, bytes(32), b"\1" * 32)
    rows = [
        builders.row(builders.identity(1), claims=(later, genesis)),
        builders.row(builders.identity(2), claims=(later, genesis_claim(b"\2" * 32))),
        builders.row(builders.identity(3), claims=(genesis._replace(tokens=2**59),)),
    ]
    found = said(peers(*rows, genesis=genesis, ledger=Ledger()), *rows)
    assert [one.claims for one in found] == [(later, genesis), (later,), ()]


def test_who_was_named_and_who_has_published_is_told_apart() -> None:
    """A round that is merely said to be reached costs nothing to say."""
    rows = [builders.row(builders.identity(number), round=9) for number in range(3)]
    ledger = Ledger()
    ledger.note_last(rows[1].node_id, 3, bytes(32))
    of = peers(*rows, genesis=genesis_claim(bytes(32)), ledger=ledger, named={rows[2].node_id})
    found = said(of, *rows)
    assert [(one.is_named, one.round) for one in found] == [(False, 0), (False, 9), (True, 0)]
    assert of.authors() == 1


def test_authors_that_are_gone_count_unless_they_have_left() -> None:
    """It may be we who are cut off from them, with a few others or with liars."""
    rows = [builders.row(builders.identity(number), leaving=number == 2) for number in range(3)]
    ledger = Ledger()
    for row in rows:
        ledger.note_last(row.node_id, 1, bytes(32))
    of = peers(*rows, genesis=genesis_claim(bytes(32)), ledger=ledger)
    of._roster.judge(rows[1].node_id, Health.DOWN, 1.0)
    assert of.authors() == 2
