"""Who was away: whether the swarm has outlived what it holds, and where it begins anew."""

import pytest

from gossamer.protocol import limits
from gossamer.protocol.effects import Adopt, Notice
from gossamer.protocol.history.joining import RETURN_S, known_up_to
from gossamer.protocol.history.peer_claims import PeerClaim
from gossamer.protocol.history.snapshots import LOOK_INTERVAL_S
from tests.protocol.builders import unsigned
from tests.protocol.histories import MANIFEST, Told, claim, drive, joined, kinds, sealing_of
from tests.protocol.wiring import World


@pytest.mark.parametrize("is_first", [False, True])
def test_who_missed_rounds_that_the_swarm_has_closed_begins_anew(is_first):
    sealing = sealing_of(is_first=is_first)
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
def test_who_comes_back_and_goes_on_by_itself_has_missed_nothing(others):
    """However fast its rounds are: nobody has gone on without it."""
    sealing = sealing_of(is_first=False)
    sealing.restore((claim(16), claim(8)), 0, extent=20)
    for tick in range(60):
        sealing.wake(tick / 2, 20 + 2 * tick, Told(list(map(PeerClaim, others))))
    assert not sealing.starts_over and sealing.joined


@pytest.mark.parametrize(
    ("is_named", "stayed", "is_believed"),
    [(True, 0, True), (False, 0, False), (True, 21, False)],
    ids=["at a join address", "elsewhere", "others train on"],
)
def test_where_only_who_does_not_train_went_on_a_join_address_is_believed(is_named, stayed, is_believed):
    """A bootstrap peer, say, while those that trained with it are gone. It moves no clock."""
    sealing = sealing_of(is_first=False)
    sealing.restore((claim(16), claim(8)), 0, extent=20)
    observer = PeerClaim((claim(96), claim(88)), b"observer", is_named)
    back = PeerClaim((claim(16),), b"back", round=stayed)
    for tick in range(20):
        sealing.wake(tick / 2, 20, Told([observer, back]))
    assert sealing.starts_over is is_believed and sealing.joined is not is_believed
    assert sealing.adopting == (claim(96) if is_believed else None)


@pytest.mark.parametrize(
    ("sealed", "rounds", "known"),
    [
        (16, range(1, 21), 18),
        (19, range(1, 21), 19),
        (16, [*range(1, 21), *range(42, 60)], 18),
        (56, [*range(1, 21), *range(58, 60)], 57),
        (16, [17, 20, 21], 19),
        (16, [17, 21], 16),
        (16, [], 16),
    ],
)
def test_who_stopped_before_it_had_made_good_what_it_missed_has_missed_it_still(sealed, rounds, known):
    """It is killed while it fetches the swarm's snapshot, say: the newest records are here already."""
    assert known_up_to(sealed, rounds) == known


def test_a_node_counts_what_it_has_missed_from_the_records_that_it_stored(seed):
    core = World(seed, MANIFEST).add(0).core
    stored = [unsigned(1, round_) for round_ in (*range(13, 21), *range(42, 60))]
    core.restore(stored, (), 0.0, claims=(claim(16), claim(8)), floor=8)
    assert core.sealing._away.extent == 18


@pytest.mark.parametrize("alone", [20, 23], ids=["waited", "went on by itself"])
def test_whose_network_comes_late_looks_once_it_hears_of_others(alone):
    """Its machine was faster than its router, say. If it published meanwhile, there are two histories."""
    sealing = sealing_of(is_first=False)
    sealing.restore((claim(16), claim(8)), 0, extent=20)
    assert drive(sealing, 0.0, 4 * RETURN_S, clock=alone) == []
    drive(sealing, 4 * RETURN_S + 0.5, limits.ROSTER_PATIENCE_S, clock=100, others=[(claim(96), claim(88))])
    assert sealing.starts_over is (alone == 20)


def slept():
    """Fell asleep at round 20, and woke."""
    sealing = joined(claim(16), claim(8))
    drive(sealing, 0.0, RETURN_S + 2 * LOOK_INTERVAL_S, clock=20, others=[()])
    sealing.came_back(18)
    return sealing


def finds_out(sealing, now, members):
    """Look for long enough to be sure that the swarm went on to round 100."""
    sealing.wake(now - limits.ROSTER_PATIENCE_S, 100, Told(members))
    assert sealing.may_be_outlived and not sealing.starts_over
    return sealing.wake(now, 100, Told(members))


def test_the_first_to_be_heard_after_a_return_is_not_believed_alone():
    """It may be a liar, whose word about the clock is all there is for a moment."""
    sealing = sealing_of(is_first=False)
    sealing.restore((claim(16), claim(8)), 0, extent=20)
    liar = PeerClaim((claim(5_000_000),), b"liar")
    assert not sealing.wake(0.0, 5_000_000, Told([liar]))
    assert sealing.may_be_outlived
    others = [PeerClaim((claim(16), claim(8)), b"friend %d" % number) for number in range(3)]
    for tick in range(2 * int(RETURN_S)):
        assert not kinds(sealing.wake(0.5 + tick / 2, 22, Told([liar, *others])), Adopt)
        assert not sealing.starts_over and not sealing.may_be_outlived


@pytest.mark.parametrize("woke_in_between", [False, True])
def test_who_slept_for_longer_than_rounds_are_kept_begins_anew(woke_in_between):
    sealing = slept()
    if woke_in_between:
        sealing.came_back(18)  # for half a minute, without a network: nobody was there
    others = [PeerClaim((claim(96), claim(88)), b"friend"), PeerClaim((claim(96), claim(88)), b"new")]
    effects = [effect for tick in range(10) for effect in sealing.wake(100 + tick / 2, 100, Told(others))]
    assert kinds(effects, Adopt) == [Adopt(claim(96))]
    assert sealing.starts_over
    sealing.adopted(claim(96))
    assert not sealing.starts_over


def test_who_begins_anew_does_not_start_from_the_snapshot_of_one_that_was_away_too():
    """Though that one answers at its join address, and has not found out yet."""
    sealing = slept()
    others = [PeerClaim((claim(96),), b"friend"), PeerClaim((claim(16), claim(8)), b"away", is_named=True)]
    effects = [effect for tick in range(20) for effect in sealing.wake(100 + tick / 2, 100, Told(others))]
    assert kinds(effects, Adopt) == [Adopt(claim(96))]


def test_who_begins_anew_and_falls_asleep_again_still_does():
    """Meanwhile it has heard of the rounds since, though not of all."""
    sealing = slept()
    others = [PeerClaim((claim(96),), b"friend")]
    finds_out(sealing, 100.0, others)
    sealing.came_back(98)
    effects = [effect for tick in range(20) for effect in sealing.wake(200 + tick / 2, 100, Told(others))]
    assert kinds(effects, Adopt) == [Adopt(claim(96))]


def test_a_snapshot_that_was_being_written_does_not_bring_back_what_is_given_up():
    sealing = slept()
    others = [PeerClaim((claim(96),), b"friend")]
    finds_out(sealing, 100.0, others)
    sealing.sealed((claim(24), claim(16)))
    assert not sealing.joined
    effects = [effect for tick in range(20) for effect in sealing.wake(101 + tick / 2, 100, Told(others))]
    assert kinds(effects, Adopt) == [Adopt(claim(96))]


def test_who_has_been_in_the_swarm_for_a_while_has_missed_nothing():
    sealing = sealing_of(is_first=False)
    sealing.restore((claim(16), claim(8)), 0, extent=20)
    assert sealing.is_in_a_hurry
    drive(sealing, 0.0, RETURN_S + 2 * LOOK_INTERVAL_S, clock=22, others=[()])
    assert not sealing.is_in_a_hurry
    drive(sealing, 40.0, 10, clock=100, others=[(claim(96), claim(88))] * 2)
    assert sealing.joined
