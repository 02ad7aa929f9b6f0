"""The state machine: join, seal and close."""

import pytest

from gossamer.protocol import limits
from gossamer.protocol.effects import Adopt, Close, Notice, Prefetch, Seal
from gossamer.protocol.history.claims import PeerClaim, genesis_claim
from gossamer.protocol.history.joining import PREFETCHES_MAX
from gossamer.protocol.history.snapshots import CLAIMED_MAX, GONE_AFTER_S, LOOK_INTERVAL_S
from tests.protocol.histories import MANIFEST, Told, claim, drive, joined, kinds, sealing_of


def test_the_first_node_begins_with_genesis():
    sealing = sealing_of(is_first=True)
    assert sealing.wake(0.0, 0, Told([])) == [Adopt(genesis_claim(MANIFEST.genesis.root))]
    sealing.adopted(genesis_claim(MANIFEST.genesis.root))
    sealing.sealed((genesis_claim(MANIFEST.genesis.root),))
    assert sealing.joined
    assert sealing.floor == 0


def test_a_joiner_hears_the_roster_before_it_decides():
    sealing = sealing_of(is_first=False)
    assert drive(sealing, 0.0, 60) == []
    assert drive(sealing, 60.0, 10, others=[(), ()]) == []  # others who have not joined themselves
    assert drive(sealing, 71.0, 0, others=[(claim(8),)]) == [Prefetch(claim(8))]
    late = drive(sealing, 71.5, limits.ROSTER_PATIENCE_S, others=[(claim(8),)] * 4)
    assert kinds(late, Adopt) == [Adopt(claim(8))]


def test_where_nobody_claims_more_than_the_manifest_proves_a_joiner_begins_at_once():
    genesis = genesis_claim(MANIFEST.genesis.root)
    assert drive(sealing_of(is_first=False), 0.0, 0, others=[(genesis,)] * 2) == [Adopt(genesis)]
    assert drive(sealing_of(is_first=False), 0.0, 0, others=[(genesis,), (claim(8),)]) == []


def test_a_joiner_fetches_what_it_would_start_from_while_it_listens():
    sealing = sealing_of(is_first=False)
    others = [(claim(16), claim(8)), (claim(8),), (claim(8),)]
    assert drive(sealing, 0.0, limits.ROSTER_PATIENCE_S - 0.5, others=others) == [Prefetch(claim(8))]
    assert sealing.adopting is None and sealing.sought == claim(8)
    assert drive(sealing, limits.ROSTER_PATIENCE_S, 0.0, others=others) == [Adopt(claim(8))]


def test_what_is_fetched_early_is_not_adopted_unless_it_is_chosen():
    sealing = sealing_of(is_first=False)
    lie = claim(8, mark=2)
    assert drive(sealing, 0.0, 0.5, others=[(lie,)]) == [Prefetch(lie)]
    later = drive(sealing, 1.0, 2.0, others=[(lie,), *[(claim(8),)] * 3])
    assert later == [Prefetch(claim(8)), Adopt(claim(8))]
    assert lie.key not in sealing._fetcher.wants


def test_what_is_fetched_early_and_cannot_be_used_makes_way_for_another():
    sealing = sealing_of(is_first=False)
    drive(sealing, 0.0, 0.5, others=[(claim(8, mark=2),)])
    sealing.unusable(claim(8, mark=2))
    assert sealing.sought is None
    assert drive(sealing, 1.0, 0.0, others=[(claim(8),)]) == [Prefetch(claim(8))]


def test_who_changes_its_claim_all_the_time_is_not_followed_for_ever():
    sealing = sealing_of(is_first=False)
    effects = []
    for tick in range(15):
        effects += sealing.wake(tick * 0.1, 0, Told([PeerClaim((claim(8, mark=1 + tick),))]))
    assert len(effects) == len(kinds(effects, Prefetch)) == PREFETCHES_MAX


def test_a_joiner_without_agreement_says_so_and_goes_on_trying():
    sealing = sealing_of(is_first=False)
    split = [(claim(8, mark=1),), (claim(8, mark=2),)]
    effects = drive(sealing, 0.0, 20, others=split)
    assert not kinds(effects, Adopt)
    assert kinds(effects, Notice)
    agreeing = [(claim(8, mark=2),)] * 2
    assert kinds(drive(sealing, 21.0, 2, others=agreeing), Adopt) == [Adopt(claim(8, mark=2))]


def test_a_snapshot_that_nobody_claims_any_more_is_given_up():
    sealing = sealing_of(is_first=False)
    drive(sealing, 0.0, 5, others=[(claim(8),)])
    assert sealing.adopting == claim(8)
    again = drive(sealing, 6.0, GONE_AFTER_S + 4, others=[(claim(16),)])
    assert kinds(again, Adopt) == [Adopt(claim(16))]


@pytest.mark.parametrize("is_stalled", [True, False])
def test_a_snapshot_that_one_liar_claims_for_ever_holds_nobody_up(is_stalled):
    """But one that comes is not given up, however few claim it."""
    old, new = claim(8), claim(16)
    honest = [PeerClaim((old,), bytes([n])) for n in range(4)]
    sealing = sealing_of(is_first=False)

    def look(start, members):
        found = []
        for tick in range(240):
            now = start + tick / 2
            found += sealing.wake(now, 0, Told(members), is_stalled=is_stalled and sealing.adopting == old)
        return kinds(found, Adopt)

    assert look(0.0, honest) == [Adopt(old)]
    members = [PeerClaim((new,), member.node_id) for member in honest[1:]]
    assert look(120.0, [honest[0], *members]) == ([Adopt(new)] if is_stalled else [])


def test_sealing_waits_until_payloads_had_time():
    sealing = sealing_of(is_first=True)
    sealing.adopted(genesis_claim(MANIFEST.genesis.root))
    sealing.sealed((genesis_claim(MANIFEST.genesis.root),))
    early = drive(sealing, 0.0, limits.SEAL_SETTLE_S - 1, clock=20)
    assert not kinds(early, Seal)
    late = drive(sealing, limits.SEAL_SETTLE_S, 3, clock=20)
    assert kinds(late, Seal) == [Seal(16)]


def test_what_the_clock_read_before_others_were_heard_is_not_sealed():
    """Who went back, and starts again, reads its own last round for a moment: far beyond all the others'."""
    sealing = joined(claim(16), claim(8))
    others = [(claim(16), claim(8))] * 3
    alone = drive(sealing, 0.0, 1, clock=100)
    effects = drive(sealing, 1.5, 20, clock=21, others=others)
    assert not kinds(alone + effects, Seal) and not kinds(alone + effects, Close)
    assert kinds(drive(sealing, 22.0, 10, clock=28, others=others), Seal) == [Seal(24)]


def test_what_the_clock_read_before_another_history_was_adopted_is_not_sealed():
    """It may have been that of the history before, and reads so for a moment yet."""
    sealing = joined(claim(16), claim(8))
    drive(sealing, 0.0, LOOK_INTERVAL_S, clock=100)
    sealing.adopted(claim(24))
    sealing.sealed((claim(24),))
    assert not kinds(drive(sealing, limits.SEAL_SETTLE_S + LOOK_INTERVAL_S, 1, clock=100), Seal)


def test_history_is_closed_under_an_agreed_snapshot_once_it_is_old():
    sealing = joined(claim(16), claim(8))
    others = [(claim(16), claim(8))] * 3
    assert kinds(drive(sealing, 0.0, 10, clock=23, others=others), Close) == []
    early = drive(sealing, 10.5, limits.SEAL_SETTLE_S - 1, clock=24, others=others)
    assert kinds(early, Close) == [], "the clock may fall back yet"
    late = drive(sealing, 10.5 + limits.SEAL_SETTLE_S, LOOK_INTERVAL_S, clock=24, others=others)
    assert kinds(late, Close) == [Close(8)]
    assert sealing.floor == 8


@pytest.mark.parametrize(
    "others",
    [[(claim(16, mark=2),), (claim(16, mark=3),)], [(claim(1000, mark=2),)] * 3],
    ids=["do not", "do"],
)
def test_history_is_not_closed_unless_others_agree_and_with_us(others):
    sealing = joined(claim(16, mark=1))
    assert kinds(drive(sealing, 0.0, 5, clock=100, others=others), Close) == []


def test_history_is_closed_where_others_are_some_snapshots_behind():
    """With fast rounds: they claim what we claimed a moment ago."""
    sealing = joined(claim(16))
    for round_ in (24, 32, 40):
        sealing.sealed((claim(round_), claim(round_ - 8)))
    others = [(claim(24), claim(16))] * 3
    assert kinds(drive(sealing, 0.0, 5, clock=100, others=others), Close) == [Close(24)]


@pytest.mark.parametrize(("later", "closed"), [(CLAIMED_MAX - 1, [Close(24)]), (CLAIMED_MAX, [])])
def test_of_what_was_claimed_so_much_is_remembered_and_no_more(later, closed):
    sealing = joined(claim(16))
    for number in range(later + 1):
        sealing.sealed((claim(24 + 8 * number),))
    others = [(claim(24),)] * 3
    assert kinds(drive(sealing, 0.0, 5, clock=1000, others=others), Close) == closed


def test_who_has_begun_claims_the_snapshot_once_its_sums_are_here():
    sealing = sealing_of(is_first=False)
    others = [(claim(8),)] * 3
    assert kinds(drive(sealing, 0.0, 10.0, others=others), Adopt) == [Adopt(claim(8))]
    sealing.adopted(claim(8))
    assert sealing.joined and sealing.whole_claims == () and sealing.sought == claim(8)
    sealing.sealed((claim(8),))
    assert sealing.whole_claims == (claim(8),) and sealing.sought is None


def test_a_fork_that_comes_to_nothing_leaves_the_sums_wanted():
    sealing = sealing_of(is_first=False)
    sealing.adopted(claim(8))
    sealing._seek(claim(16, mark=2))
    sealing.unusable(claim(16, mark=2))
    assert sealing.sought == claim(8) and sealing.adopting is None


@pytest.mark.parametrize("somebody_else", [True, False])
def test_who_cannot_have_the_sums_any_more_starts_again_if_it_can(somebody_else):
    """Its peers have gone on to other snapshots, or are gone. Alone it goes on with what it has."""
    sealing = sealing_of(is_first=False)
    sealing.restore((claim(8),), 8, is_whole=False)
    assert sealing.sought == claim(8)
    begun = 2 * GONE_AFTER_S
    assert not kinds(drive(sealing, begun, 20.0, others=[(claim(8),)] * 3), Adopt)
    others = [(claim(24),)] * 3 if somebody_else else []
    effects = drive(sealing, begun + 20.0, GONE_AFTER_S + 20.0, others=others)
    assert kinds(effects, Adopt) == [Adopt(claim(24))] * somebody_else
    assert sealing.joined is not somebody_else
