"""The state machine: join, seal, close, and settle two lineages."""

from itertools import pairwise

import pytest

from gossamer.protocol import limits
from gossamer.protocol.absence import RETURN_S
from gossamer.protocol.effects import Adopt, Close, Notice, Prefetch, Seal
from gossamer.protocol.history import Claim, genesis_claim
from gossamer.protocol.joining import PREFETCHES_MAX, Witness
from gossamer.protocol.lineages import DIFFERENCE_KEPT_S, SILENCE_S
from gossamer.protocol.sealing import GONE_AFTER_S, LOOK_INTERVAL_S, Sealing
from tests.protocol import builders

HISTORY = {"seal_after": 4, "snapshot_every": 8, "retain": 16}


def claim(round_: int, tokens: int = 0, mark: int = 1) -> Claim:
    return Claim(round_, tokens, bytes([mark]) * 32, bytes([mark]) * 32)


@pytest.fixture
def manifest():
    return builders.manifest(history=HISTORY)


def drive(sealing, start, seconds, clock=0, others=(), lacking=0.0):
    """Wake it twice a second; returns everything it asked for."""
    result = []
    for tick in range(int(seconds * 2) + 1):
        result += sealing.wake(start + tick / 2, clock, list(map(Witness, others)), lambda round_: lacking)
    return result


def kinds(effects, kind):
    return [effect for effect in effects if isinstance(effect, kind)]


def test_the_first_node_begins_with_genesis(manifest):
    sealing = Sealing(manifest, is_first=True)
    assert sealing.wake(0.0, 0, []) == [Adopt(genesis_claim(manifest.genesis.root))]
    sealing.adopted(genesis_claim(manifest.genesis.root))
    assert sealing.joined
    assert sealing.floor == 0


def test_a_joiner_waits_for_somebody(manifest):
    sealing = Sealing(manifest, is_first=False)
    assert drive(sealing, 0.0, 60) == []
    assert drive(sealing, 60.0, 10, others=[(), ()]) == []  # others who have not joined themselves


def test_a_joiner_hears_the_roster_before_it_decides(manifest):
    sealing = Sealing(manifest, is_first=False)
    genesis = genesis_claim(manifest.genesis.root)
    assert sealing.wake(0.0, 0, [Witness((genesis,))]) == []
    late = drive(sealing, 0.5, limits.ROSTER_PATIENCE_S, others=[(genesis,)] * 4)
    assert kinds(late, Adopt) == [Adopt(genesis)]


def test_a_joiner_takes_the_newest_snapshot_that_enough_claim(manifest):
    sealing = Sealing(manifest, is_first=False)
    others = [(claim(16), claim(8)), (claim(8),), (claim(8),), (claim(16),)]
    assert kinds(drive(sealing, 0.0, 5, others=others), Adopt) == [Adopt(claim(8))]


def test_a_joiner_believes_whom_it_was_told_to(manifest):
    sealing = Sealing(manifest, is_first=False, trusted=[b"friend"])
    members = [*[Witness((claim(16, mark=9),))] * 5, Witness((claim(8),), b"friend")]
    assert kinds(sealing.wake(0.0, 0, members), Adopt) == []
    assert kinds(sealing.wake(3.0, 0, members), Adopt) == [Adopt(claim(8))]


def test_a_joiner_fetches_what_most_claim_while_it_listens(manifest):
    sealing = Sealing(manifest, is_first=False)
    others = [(claim(16), claim(8)), (claim(8),), (claim(8),)]
    effects = drive(sealing, 0.0, limits.ROSTER_PATIENCE_S - 0.5, others=others)
    assert effects == [Prefetch(claim(8))]
    assert sealing.adopting is None
    assert drive(sealing, limits.ROSTER_PATIENCE_S, 0.0, others=others) == [Adopt(claim(8))]


def test_what_is_fetched_early_is_not_adopted_unless_enough_claim_it(manifest):
    sealing = Sealing(manifest, is_first=False)
    first = drive(sealing, 0.0, 0.5, others=[(claim(8, mark=2),)])
    assert first == [Prefetch(claim(8, mark=2))]
    others = [(claim(8, mark=2),), *[(claim(8),)] * 3]
    later = drive(sealing, 1.0, 2.0, others=others)
    assert later == [Prefetch(claim(8)), Adopt(claim(8))]


def test_who_changes_its_claim_all_the_time_is_not_followed_for_ever(manifest):
    sealing = Sealing(manifest, is_first=False)
    effects = []
    for tick in range(15):
        effects += sealing.wake(tick * 0.1, 0, [Witness((claim(8, mark=1 + tick),))])
    assert len(kinds(effects, Prefetch)) == PREFETCHES_MAX
    assert not kinds(effects, Adopt)


def test_a_joiner_without_agreement_says_so_and_goes_on_trying(manifest):
    sealing = Sealing(manifest, is_first=False)
    split = [(claim(8, mark=1),), (claim(8, mark=2),)]
    effects = drive(sealing, 0.0, 20, others=split)
    assert not kinds(effects, Adopt)
    assert kinds(effects, Notice)
    agreeing = [(claim(8, mark=2),)] * 2
    assert kinds(drive(sealing, 21.0, 2, others=agreeing), Adopt) == [Adopt(claim(8, mark=2))]


def test_a_snapshot_that_nobody_claims_any_more_is_given_up(manifest):
    sealing = Sealing(manifest, is_first=False)
    drive(sealing, 0.0, 5, others=[(claim(8),)])
    assert sealing.adopting == claim(8)
    again = drive(sealing, 6.0, GONE_AFTER_S + 4, others=[(claim(16),)])
    assert kinds(again, Adopt) == [Adopt(claim(16))]


def test_a_snapshot_that_cannot_be_does_not_hold_our_own_history_up(manifest):
    """Though those who claim it are most, and go on claiming it."""
    sealing = joined(manifest, claim(8))
    sealing._absence.looks_until = 0.0
    lie = claim(8, tokens=5, mark=9)
    others = [(lie,)] * 3
    assert kinds(drive(sealing, 0.0, 2 * limits.LINEAGE_PATIENCE_S, clock=10, others=others), Adopt) == [
        Adopt(lie)
    ]
    sealing.unusable(claim(16))
    assert sealing.adopting == lie, "that was another one"
    sealing.unusable(lie._replace(tokens=6))
    assert sealing.adopting is None
    others = [(claim(8, tokens=5, mark=10),)] * 3
    found = drive(sealing, 30.0, limits.LINEAGE_PATIENCE_S - 1, clock=20, others=others)
    assert kinds(found, Seal) == [Seal(16)]
    assert not kinds(found, Adopt), "what comes after it has to last as long"


@pytest.mark.parametrize("is_stalled", [True, False])
def test_a_snapshot_that_one_liar_claims_for_ever_holds_nobody_up(manifest, is_stalled):
    """But one that comes is not given up, however few claim it."""
    old, new = claim(8), claim(16)
    honest = [Witness((old,), bytes([n])) for n in range(4)]
    sealing = Sealing(manifest, is_first=False)

    def look(start, members):
        found = []
        for tick in range(240):
            now = start + tick / 2
            found += sealing.wake(now, 0, members, is_stalled=lambda claim: is_stalled and claim == old)
        return kinds(found, Adopt)

    assert look(0.0, honest) == [Adopt(old)]
    members = [Witness((new,), member.node_id) for member in honest[1:]]
    assert look(120.0, [honest[0], *members]) == ([Adopt(new)] if is_stalled else [])


def test_sealing_waits_until_payloads_had_time(manifest):
    sealing = Sealing(manifest, is_first=True)
    sealing.adopted(genesis_claim(manifest.genesis.root))
    early = drive(sealing, 0.0, limits.SEAL_SETTLE_S - 1, clock=20)
    assert not kinds(early, Seal)
    late = drive(sealing, limits.SEAL_SETTLE_S, 3, clock=20)
    assert kinds(late, Seal) == [Seal(16)]


def test_what_the_clock_read_before_others_were_heard_is_not_sealed(manifest):
    """Who went back, and starts again, reads its own last round for a moment: far beyond all the others'."""
    sealing = joined(manifest, claim(16), claim(8))
    others = [(claim(16), claim(8))] * 3
    alone = drive(sealing, 0.0, 1, clock=100)
    effects = drive(sealing, 1.5, 20, clock=21, others=others)
    assert not kinds(alone + effects, Seal) and not kinds(alone + effects, Close)
    assert kinds(drive(sealing, 22.0, 10, clock=28, others=others), Seal) == [Seal(24)]


def joined(manifest, *claims, floor=0, own_last=0):
    """As after an earlier run that has missed nothing."""
    sealing = Sealing(manifest, is_first=False, own_last=lambda: own_last)
    sealing.restore(claims, floor, extent=10**6)
    return sealing


@pytest.mark.parametrize("is_first", [False, True])
def test_who_missed_rounds_that_the_swarm_has_closed_begins_anew(manifest, is_first):
    sealing = Sealing(manifest, is_first=is_first)
    sealing.restore((claim(16), claim(8)), 0, extent=20)
    others = [(claim(96), claim(88))] * 2 + [()]
    assert drive(sealing, 0.0, 2, clock=39, others=others) == [], "these are kept yet"
    effects = drive(sealing, 2.5, 5, clock=40, others=others)
    assert kinds(effects, Adopt) == [Adopt(claim(96))]
    (notice,) = kinds(effects, Notice)
    assert "we were away since round 20" in notice.text
    assert not sealing.claims, "it stands for nothing: two such could be most of a small swarm"
    sealing.adopted(claim(96))
    assert sealing.joined and sealing.floor == 96


@pytest.mark.parametrize("others", [[], [(claim(16), claim(8))]], ids=["alone", "all were away"])
def test_who_comes_back_and_goes_on_by_itself_has_missed_nothing(manifest, others):
    """However fast its rounds are: nobody has gone on without it."""
    sealing = Sealing(manifest, is_first=False)
    sealing.restore((claim(16), claim(8)), 0, extent=20)
    for tick in range(60):
        sealing.wake(tick / 2, 20 + 2 * tick, list(map(Witness, others)))
    assert not sealing.begins_anew and sealing.joined


def test_who_is_told_of_every_round_since_it_came_back_has_missed_none(manifest):
    ledger = set(range(1, 21))
    sealing = Sealing(manifest, is_first=False, tells_of=lambda round_, but: round_ in ledger)
    sealing.restore((claim(16), claim(8)), 0, extent=20)
    for clock in range(21, 100):
        ledger.add(clock)
        others = [Witness((claim(clock // 8 * 8),))] * 2
        sealing.wake(clock / 4, clock, others)
    assert not sealing.begins_anew and sealing.joined


def test_who_is_told_of_new_rounds_only_has_missed_those_between(manifest):
    ledger = {*range(1, 21), *range(42, 60)}
    sealing = Sealing(manifest, is_first=False, tells_of=lambda round_, but: round_ in ledger)
    sealing.restore((claim(16), claim(8)), 0, extent=20)
    drive(sealing, 0.0, 5, clock=59, others=[(claim(56), claim(48))] * 2)
    assert sealing.begins_anew


def test_what_others_who_were_away_publish_late_tells_nothing_of_the_rounds_since(manifest):
    """They wake as we do, and hand out deltas of the round of then: of those after it nobody tells us."""
    ledger = {round_: {b"away"} for round_ in range(21, 25)} | {round_: {b"on"} for round_ in range(42, 60)}
    sealing = Sealing(
        manifest, is_first=False, tells_of=lambda round_, but: bool(ledger.get(round_, set()) - set(but))
    )
    sealing.restore((claim(16), claim(8)), 0, extent=20)
    others = [Witness((claim(56), claim(48)), b"on"), Witness((claim(16), claim(8)), b"away")]
    for tick in range(40):
        sealing.wake(tick / 4, 59, others)
    assert sealing.begins_anew
    assert sealing._absence.extent == 20


def slept(manifest, company):
    """Fell asleep at round 20, and woke."""
    sealing = joined(manifest, claim(16), claim(8))
    drive(sealing, 0.0, RETURN_S + 2 * LOOK_INTERVAL_S, clock=20)
    sealing.came_back(18, frozenset(company))
    return sealing


def finds_out(sealing, now, members):
    """Look for long enough to be sure that the swarm went on to round 100."""
    sealing.wake(now - limits.ROSTER_PATIENCE_S, 100, members)
    assert sealing.may_be_outlived and not sealing.begins_anew
    return sealing.wake(now, 100, members)


def test_the_first_to_be_heard_after_a_return_is_not_believed_alone(manifest):
    """It may be a liar, whose word about the clock is all there is for a moment."""
    sealing = Sealing(manifest, is_first=False)
    sealing.restore((claim(16), claim(8)), 0, extent=20)
    liar = Witness((claim(5_000_000),), b"liar")
    assert not sealing.wake(0.0, 5_000_000, [liar])
    assert sealing.may_be_outlived
    others = [Witness((claim(16), claim(8)), b"friend %d" % number) for number in range(3)]
    for tick in range(2 * int(RETURN_S)):
        assert not kinds(sealing.wake(0.5 + tick / 2, 22, [liar, *others]), Adopt)
        assert not sealing.begins_anew and not sealing.may_be_outlived


@pytest.mark.parametrize("woke_in_between", [False, True])
def test_who_slept_for_longer_than_rounds_are_kept_begins_anew(manifest, woke_in_between):
    sealing = slept(manifest, [b"friend"])
    if woke_in_between:
        sealing.came_back(18, frozenset())  # for half a minute, without a network: nobody was there
    others = [Witness((claim(96), claim(88)), b"friend"), Witness((claim(96), claim(88)), b"new")]
    effects = [effect for tick in range(10) for effect in sealing.wake(100 + tick / 2, 100, others)]
    assert kinds(effects, Adopt) == [Adopt(claim(96))]
    assert sealing.begins_anew
    sealing.adopted(claim(96))
    assert not sealing.begins_anew


def test_who_slept_and_was_cut_off_before_keeps_its_history(manifest):
    """Those who went on were not there when it fell asleep: two lineages, of which one wins."""
    sealing = slept(manifest, [b"friend"])
    others = [Witness((claim(96), claim(88)), b"stranger"), Witness((claim(16), claim(8)), b"friend")]
    for tick in range(120):
        assert not kinds(sealing.wake(100 + tick / 2, 100, others), Adopt)
    assert claim(16) in sealing.claims


def test_who_begins_anew_does_not_start_from_the_snapshot_of_one_that_was_away_too(manifest):
    """Though that one answers at its join address, and has not found out yet."""
    sealing = slept(manifest, [b"friend"])
    others = [Witness((claim(96),), b"friend"), Witness((claim(16), claim(8)), b"away", is_named=True)]
    effects = [effect for tick in range(20) for effect in sealing.wake(100 + tick / 2, 100, others)]
    assert kinds(effects, Adopt) == [Adopt(claim(96))]


@pytest.mark.parametrize("is_named", [False, True])
def test_who_begins_anew_goes_on_from_its_own_snapshot_if_those_who_went_on_are_gone_for_long(
    manifest, is_named
):
    """No single death stops a swarm; another one that was away has no more than we have."""
    sealing = slept(manifest, [b"friend"])
    away = Witness((), b"away", is_named)
    ahead = Witness((claim(96),), b"friend", is_named)
    assert not kinds(finds_out(sealing, 100.0, [away, ahead]), Adopt)
    assert sealing.begins_anew
    patience = int(limits.OUTLIVED_PATIENCE_S)
    effects = [effect for tick in range(patience - 5) for effect in sealing.wake(101.0 + tick, 100, [away])]
    assert not effects, "they may come back"
    effects = [e for tick in range(30) for e in sealing.wake(100.0 + patience + tick, 100, [away])]
    assert kinds(effects, Adopt) == [Adopt(claim(16))]
    assert "from our own snapshot of round 16" in kinds(effects, Notice)[0].text
    sealing.adopted(claim(16))
    assert sealing.joined and not sealing.begins_anew


def test_who_begins_anew_and_falls_asleep_again_still_does(manifest):
    """Meanwhile it has heard of the rounds since, though not of all."""
    sealing = slept(manifest, [b"friend"])
    others = [Witness((claim(96),), b"friend")]
    finds_out(sealing, 100.0, others)
    sealing.came_back(98, frozenset([b"friend"]))
    effects = [effect for tick in range(20) for effect in sealing.wake(200 + tick / 2, 100, others)]
    assert kinds(effects, Adopt) == [Adopt(claim(96))]


def test_a_snapshot_that_was_being_written_does_not_bring_back_what_is_given_up(manifest):
    sealing = slept(manifest, [b"friend"])
    others = [Witness((claim(96),), b"friend")]
    finds_out(sealing, 100.0, others)
    sealing.sealed((claim(24), claim(16)))
    assert not sealing.joined
    effects = [effect for tick in range(20) for effect in sealing.wake(101 + tick / 2, 100, others)]
    assert kinds(effects, Adopt) == [Adopt(claim(96))]


def test_who_has_been_in_the_swarm_for_a_while_has_missed_nothing(manifest):
    sealing = Sealing(manifest, is_first=False)
    sealing.restore((claim(16), claim(8)), 0, extent=20)
    assert sealing.is_in_a_hurry
    drive(sealing, 0.0, RETURN_S + 2 * LOOK_INTERVAL_S, clock=22)
    assert not sealing.is_in_a_hurry
    drive(sealing, 40.0, 10, clock=100, others=[(claim(96), claim(88))] * 2)
    assert sealing.joined


def test_history_is_closed_under_an_agreed_snapshot_once_it_is_old(manifest):
    sealing = joined(manifest, claim(16), claim(8))
    others = [(claim(16), claim(8))] * 3
    assert kinds(drive(sealing, 0.0, 10, clock=23, others=others), Close) == []
    early = drive(sealing, 10.5, limits.SEAL_SETTLE_S - 1, clock=24, others=others)
    assert kinds(early, Close) == [], "the clock may fall back yet"
    late = drive(sealing, 10.5 + limits.SEAL_SETTLE_S, LOOK_INTERVAL_S, clock=24, others=others)
    assert kinds(late, Close) == [Close(8)]
    assert sealing.floor == 8


def test_history_is_not_closed_while_members_disagree(manifest):
    sealing = joined(manifest, claim(16, mark=1))
    others = [(claim(16, mark=2),), (claim(16, mark=3),)]
    assert kinds(drive(sealing, 0.0, 5, clock=100, others=others), Close) == []


def test_history_is_not_closed_because_others_agree_on_something_else(manifest):
    sealing = joined(manifest, claim(16, mark=1))
    assert kinds(drive(sealing, 0.0, 5, clock=100, others=[(claim(1000, mark=2),)] * 3), Close) == []


def test_a_member_whose_snapshots_have_stopped_holds_up_no_contest_for_long(manifest):
    """Its disk is full, say: it claims an old round for ever, which would keep two halves apart."""
    ours, theirs, old = claim(16, tokens=5, mark=1), claim(16, tokens=9, mark=2), claim(8)
    for friends in (0, 1):
        sealing = joined(manifest, ours)
        others = [(ours,)] * friends + [(theirs,)] * (1 + friends) + [(old,)]
        before = drive(sealing, 0.0, SILENCE_S, clock=16, others=others)
        assert not kinds(before, Adopt), "it may be writing the next one"
        late = drive(sealing, SILENCE_S + 1, limits.LINEAGE_PATIENCE_S + 10, clock=16, others=others)
        assert kinds(late, Adopt) == [Adopt(theirs)]


def test_a_lone_liar_that_waits_for_its_moments_wins_no_contest(manifest):
    """The others come to our round each time, or to the next, when the liar is silent."""
    ours, lie, old = claim(16, tokens=5), claim(16, tokens=2**59, mark=7), claim(8)
    sealing = joined(manifest, ours)
    for start in range(0, 2 * int(SILENCE_S), 40):
        assert not kinds(drive(sealing, start, 20.0, clock=16, others=[(lie,), (old,), (old,)]), Adopt)
        assert not kinds(drive(sealing, start + 20, 20.0, clock=16, others=[(old,), (ours,), (ours,)]), Adopt)


def test_who_is_cut_off_does_not_yield_to_what_was_said_before(manifest):
    """It alone has a delta that it published late, and the others' rows are from before they could know."""
    sealing = joined(manifest, claim(16, tokens=5, mark=1))
    winner = claim(16, tokens=9, mark=2)
    for tick in range(100):
        said = [Witness((winner,), told=min(tick / 2, 3.0))] * 3
        assert not kinds(sealing.wake(tick / 2, 16, said), Adopt)
    back = [
        effect
        for now in range(50, 70)
        for effect in sealing.wake(float(now), 16, [Witness((winner,), told=float(now))] * 3)
    ]
    assert kinds(back, Adopt) == [Adopt(winner)]


def test_a_claim_of_nobody_who_is_there_is_not_adopted(manifest):
    """Those who made it are down: there is nobody to fetch it from."""
    sealing = joined(manifest, claim(16, tokens=5))
    gone = (claim(16, tokens=9, mark=2),)
    for tick in range(200):
        effects = sealing.wake(
            2.5 * tick, 16, [Witness((claim(16, tokens=4, mark=3),))], contributors=lambda: [gone] * 3
        )
        assert not kinds(effects, Adopt)


def test_the_lighter_lineage_yields_loudly_after_a_while(manifest):
    sealing = joined(manifest, claim(16, tokens=5, mark=1))
    winner = claim(16, tokens=9, mark=2)
    others = [(winner,)] * 3
    early = drive(sealing, 0.0, limits.LINEAGE_PATIENCE_S - 1, clock=16, others=others)
    assert not kinds(early, Adopt)
    late = drive(sealing, limits.LINEAGE_PATIENCE_S, 2, clock=16, others=others)
    assert kinds(late, Adopt) == [Adopt(winner)]
    assert any("TWO LINEAGES" in notice.text for notice in kinds(late, Notice))


def test_names_without_deltas_have_no_voice_against_our_history(manifest):
    sealing = Sealing(manifest, is_first=True)
    sealing.adopted(claim(8, tokens=10, mark=1))
    invented = [(claim(8, tokens=2**59, mark=2),)] * 5
    effects = []
    for tick in range(100):
        effects += sealing.wake(tick / 2, 0, list(map(Witness, invented)), contributors=lambda: [])
    assert effects == []
    for tick in range(int(2 * limits.LINEAGE_PATIENCE_S) + 2):
        now = 60.0 + tick / 2
        effects += sealing.wake(now, 0, list(map(Witness, invented)), contributors=lambda: invented[:3])
    assert kinds(effects, Adopt), "those who contribute have one"


def test_the_heavier_lineage_stays(manifest):
    sealing = joined(manifest, claim(16, tokens=9, mark=1))
    others = [(claim(16, tokens=5, mark=2),)]
    assert not kinds(drive(sealing, 0.0, 60, clock=16, others=others), Adopt)


def test_a_difference_is_no_lineage_while_payloads_are_missing(manifest):
    sealing = joined(manifest, claim(16, tokens=5, mark=1))
    others = [(claim(16, tokens=9, mark=2),)] * 3
    patience = limits.LINEAGE_MINORITY_PATIENCE_S
    assert not kinds(drive(sealing, 0.0, 2 * patience, clock=16, others=others, lacking=0.5), Adopt)


def test_a_few_who_dribble_their_payloads_are_waited_for_only_a_while(manifest):
    sealing = joined(manifest, claim(16, tokens=5, mark=1))
    others = [(claim(16, tokens=9, mark=2),)] * 3
    patience = limits.LINEAGE_MINORITY_PATIENCE_S
    drive(sealing, 0.0, 100, clock=16, others=others, lacking=0.5)
    assert not kinds(drive(sealing, 101.0, patience - 10, clock=16, others=others, lacking=0.3), Adopt)
    assert kinds(drive(sealing, 101.0 + patience, 5, clock=16, others=others, lacking=0.3), Adopt)


def test_payloads_of_later_rounds_explain_no_difference(manifest):
    sealing = joined(manifest, claim(16, tokens=5, mark=1))
    witnesses = [Witness((claim(16, tokens=9, mark=2),))] * 3
    effects = []
    for tick in range(2 * int(limits.LINEAGE_PATIENCE_S) + 6):
        effects += sealing.wake(tick / 2, 16, witnesses, lambda round_: float(round_ > 16))
    assert kinds(effects, Adopt)


def test_a_difference_that_heals_is_forgotten(manifest):
    sealing = joined(manifest, claim(16, tokens=5, mark=1))
    winner = claim(16, tokens=9, mark=2)
    drive(sealing, 0.0, limits.LINEAGE_PATIENCE_S - 2, clock=16, others=[(winner,)] * 3)
    sealing.sealed((winner,))
    assert drive(sealing, limits.LINEAGE_PATIENCE_S, 5, clock=16, others=[(winner,)] * 3) == []


def test_a_difference_that_shows_now_and_then_is_one_all_the_same(manifest):
    """With fast rounds members have seldom sealed the very round that we have."""
    sealing = joined(manifest, claim(16, tokens=5, mark=1))
    differs, elsewhere = [(claim(16, tokens=9, mark=2),)] * 3, [(claim(24, tokens=12, mark=2),)] * 3
    effects = []
    for period in range(4):
        effects += drive(sealing, period * 8.0, 3.0, clock=16, others=differs)
        effects += drive(sealing, period * 8.0 + 4.0, 3.0, clock=16, others=elsewhere)
    assert kinds(effects, Adopt) == [Adopt(claim(16, tokens=9, mark=2))]


def test_a_difference_from_long_ago_is_a_new_one(manifest):
    sealing = joined(manifest, claim(16, tokens=5, mark=1))
    differs = [(claim(16, tokens=9, mark=2),)] * 3
    effects = drive(sealing, 0.0, 3.0, clock=16, others=differs)
    effects += drive(sealing, 3.5, 2 * DIFFERENCE_KEPT_S, clock=16, others=[])
    effects += drive(sealing, 4.0 + 2 * DIFFERENCE_KEPT_S, 3.0, clock=16, others=differs)
    assert not kinds(effects, Adopt)


def test_history_is_closed_where_others_are_some_snapshots_behind(manifest):
    """With fast rounds: they claim what we claimed a moment ago."""
    sealing = joined(manifest, claim(16))
    for round_ in (24, 32, 40):
        sealing.sealed((claim(round_), claim(round_ - 8)))
    others = [(claim(24), claim(16))] * 3
    assert kinds(drive(sealing, 0.0, 5, clock=100, others=others), Close) == [Close(24)]


def test_what_was_claimed_before_a_late_record_counts_no_more(manifest):
    sealing = joined(manifest, claim(16))
    for round_ in (24, 32, 40):
        sealing.sealed((claim(round_), claim(round_ - 8)))
    sealing.sealed((claim(40, mark=2), claim(32)))
    others = [(claim(24), claim(16))] * 3
    assert kinds(drive(sealing, 0.0, 5, clock=100, others=others), Close) == []


def yields(manifest, sealing, start, seconds):
    """Others claim another thing than we do for our round, each time anew."""
    times = []
    for tick in range(int(seconds)):
        own = sealing.claims[0]
        other = own._replace(root=bytes([own.root[0] % 250 + 1]) * 32)
        found = kinds(sealing.wake(start + tick, 16, [Witness((other,))] * 3), Adopt)
        if found:
            times.append(start + tick)
            sealing.adopted(other)
    return times


def test_who_has_given_its_history_up_lately_takes_its_time(manifest):
    """One key can split those who have closed a round from those who have not, for 300 bytes each time."""
    sealing = joined(manifest, claim(16, tokens=5))
    times = yields(manifest, sealing, 0.0, 1600)
    assert len(times) == 7
    gaps = [later - earlier for earlier, later in pairwise(times)]
    wanted = [limits.LINEAGE_PATIENCE_S * 2**number for number in range(1, 7)]
    assert all(want <= gap < want + 10 for gap, want in zip(gaps, wanted, strict=True))
    (again,) = yields(manifest, sealing, 1600.0 + limits.LINEAGE_MEMORY_S, 20)
    assert again < 1620 + limits.LINEAGE_MEMORY_S, "that was long ago"


def ahead(manifest):
    """One that has closed rounds up to 96, which the others have not reached."""
    return joined(manifest, claim(112, mark=9), claim(104, mark=9), floor=96, own_last=115)


def at(round_, claims, node_id, told=float("inf")):
    return Witness(claims, node_id, told=told, round=round_)


SLOW = [at(38, (claim(32), claim(24)), bytes([n])) for n in range(4)]
LIAR = at(5, (claim(0, mark=7),), b"liar")
BESIDE = at(117, (claim(112, mark=9),), b"fast too")
STARTED = at(0, (claim(32),), b"just started")


def look(sealing, members, seconds=60, authors=0):
    effects = []
    for tick in range(2 * seconds):
        effects += sealing.wake(tick / 2, 112, members, authors=lambda: authors)
    return effects


def test_who_has_closed_what_most_members_are_at_begins_anew_where_they_are(manifest):
    """It was cut off, and went by its own fast clock."""
    sealing = ahead(manifest)
    members = [*SLOW, BESIDE]
    assert not look(sealing, members, int(limits.LINEAGE_PATIENCE_S) - 1, authors=5)
    effects = look(sealing, members, authors=5)
    assert kinds(effects, Adopt) == [Adopt(claim(32))]
    (notice,) = kinds(effects, Notice)
    assert "TWO LINEAGES" in notice.text and "77 rounds to go, those that we signed" in notice.text
    sealing.adopted(claim(32))
    assert sealing.floor == 32
    assert not kinds(drive(sealing, 70.0, 20, clock=39, others=[(claim(32), claim(24))] * 4), Adopt)


@pytest.mark.parametrize(
    ("members", "authors"),
    [
        ([LIAR], 3),
        ([LIAR, LIAR._replace(node_id=b"another"), *[BESIDE] * 4], 6),
        ([LIAR, LIAR._replace(node_id=b"another"), *[STARTED] * 4], 6),
        ([LIAR, LIAR._replace(node_id=b"another")], 6),
        ([STARTED] * 4, 4),
        ([member._replace(told=-100.0) for member in SLOW], 4),
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
def test_nothing_less_takes_it_back(manifest, members, authors):
    assert not kinds(look(ahead(manifest), members, authors=authors), Adopt)
