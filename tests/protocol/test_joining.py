"""Whom a joiner believes, when it may train, and whether one that was away begins anew."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gossamer.protocol import limits
from gossamer.protocol.effects import Adopt, Notice, Outbox
from gossamer.protocol.events import LinkUp
from gossamer.protocol.fetching.fetcher import Fetcher
from gossamer.protocol.gossip.announce import Announcer
from gossamer.protocol.gossip.anti_entropy import AntiEntropy
from gossamer.protocol.history.claims import PeerClaim
from gossamer.protocol.history.joining import REMIND_S, RETURN_S, CatchUp, Joining, believable, known_up_to
from gossamer.protocol.history.snapshots import LOOK_INTERVAL_S
from gossamer.protocol.membership.member_records import NodeInfo
from gossamer.protocol.records import Claim
from tests.protocol import builders
from tests.protocol.builders import identity
from tests.protocol.cost import calls
from tests.protocol.histories import claim, drive, joined, kinds


def claim_of(round_: int, mark: int = 1) -> Claim:
    return Claim(round_, round_ * 10, bytes([mark]) * 32, bytes([mark]) * 32)


TRUE, OLDER, NEWER = claim_of(16), claim_of(8), claim_of(24)
LIE, FAR_LIE = claim_of(16, mark=9), claim_of(1000, mark=9)


def honest(count: int, *claims: Claim) -> list[PeerClaim]:
    return [PeerClaim(claims or (TRUE, OLDER), bytes([1, number])) for number in range(count)]


def liars(count: int, *claims: Claim) -> list[PeerClaim]:
    return [PeerClaim(claims or (LIE,), bytes([9, number])) for number in range(count)]


def joiner(*trusted: bytes) -> tuple[Joining, Outbox]:
    info = NodeInfo(name="", trains=True, incarnation=1, trusted=trusted)
    context = replace(builders.context(), info=info)
    return Joining(context), context.outbox


def told_of(peer: PeerClaim) -> PeerClaim:
    return peer._replace(is_named=True)


RICH_LIE, RICH_FAR_LIE = LIE._replace(tokens=2**59), FAR_LIE._replace(tokens=2**59)
NAMED = told_of(honest(1)[0])
BEHIND = told_of(PeerClaim((claim_of(0),), b"founder without its disk"))


@pytest.mark.parametrize(
    ("members", "believed"),
    [
        ([*honest(2), *liars(1)], TRUE),
        ([*honest(5), *liars(3)], TRUE),
        ([*honest(5), *liars(3, FAR_LIE)], TRUE),
        ([*honest(3, TRUE), *liars(3)], None),
        ([*honest(3), *liars(2), *honest(1, OLDER)], OLDER),
        ([*honest(3, NEWER, TRUE), *honest(2, TRUE, OLDER)], NEWER),
        ([*honest(2, NEWER, TRUE), *honest(3, TRUE, OLDER)], TRUE),
        ([*honest(4, TRUE), *honest(3, OLDER), *liars(3, FAR_LIE)], TRUE),
        ([NAMED, *honest(3)[1:], *liars(100, LIE, FAR_LIE)], TRUE),
        ([NAMED, *liars(1)], TRUE),
        ([*honest(5), *map(told_of, liars(1, LIE, claim_of(8, mark=9)))], None),
        ([NAMED, *honest(5)[1:], *map(told_of, liars(1, RICH_LIE)), *liars(4, RICH_LIE)[1:]], TRUE),
        ([NAMED, *honest(5)[1:], *map(told_of, liars(1, RICH_FAR_LIE)), *liars(4, RICH_FAR_LIE)[1:]], TRUE),
        ([told_of(honest(1, NEWER, TRUE)[0]), NAMED, *honest(5, NEWER, TRUE)[2:]], TRUE),
        ([*honest(5), BEHIND], TRUE),
    ],
    ids=[
        "two honest members outvote a liar",
        "three liars move no joiner of a larger swarm",
        "nor about a round far ahead",
        "of two halves nobody can tell",
        "what two halves do not dispute",
        "the newest that most members make",
        "while a snapshot is being written",
        "without a majority the most common that nothing contradicts",
        "who was named before any number of names",
        "of two members the one that was named",
        "a named liar is not believed alone, nor is anybody else: only the user can tell",
        "of two named members the one with whom more agree, whatever tokens the lie has",
        "whatever its round",
        "of what two named members claim what all of them have",
        "a named member that is behind holds nobody up",
    ],
)
def test_whom_a_joiner_believes(members, believed):
    assert believable(members) == believed


@pytest.mark.parametrize("named", [BEHIND, *map(told_of, liars(1))])
def test_a_named_member_that_is_behind_or_lies_is_waited_for_a_while(named):
    assert believable([*honest(5), named], patient=True) is None


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
    assert joining.prefetch(liars(5)) is None
    assert joining.prefetch([*liars(5), *honest(1)]) == TRUE


def test_a_joiner_says_who_contradicts_whom_and_not_too_often():
    joining, outbox = joiner()
    members = [*map(told_of, honest(1, TRUE)), *liars(7)]
    assert not any(joining.choose(members, 100.0 + second) for second in range(40))
    texts = [effect.text for effect in outbox]
    assert len(texts) == -(-(40 - limits.ROSTER_PATIENCE_S) // REMIND_S)
    assert "contradict each other about round 16" in texts[0]
    assert f"and 2 more; others: {members[0].node_id.hex()} (at a join address)" in texts[0]
    assert "--trust NODE_ID" in texts[0]
    joining, outbox = joiner()
    for second in range(4):
        joining.choose([*honest(2, TRUE), *honest(2, OLDER)], 100.0 + second)
    (notice,) = outbox
    assert "contradict" not in notice.text, "they are merely at different rounds"


def test_any_number_of_rival_claims_is_looked_at_once_each():
    """A thousand made-up names with four claims each took a joiner's whole processor."""

    def spent(names: int) -> int:
        lies = [claim_of(16)._replace(digest=number.to_bytes(32, "big")) for number in range(4 * names)]
        members = [PeerClaim(tuple(lies[4 * n : 4 * n + 4]), n.to_bytes(2, "big")) for n in range(names)]
        joining, outbox = joiner()
        joining.choose(members, 0.0)
        took = calls(lambda: joining.choose(members, limits.NAMED_PATIENCE_S))
        assert "contradict each other" in outbox[0].text
        return took

    assert spent(400) < 5 * spent(100)


HELD, LATER = (claim(16), claim(8)), (claim(96), claim(88))
FRIEND = PeerClaim(LATER, b"friend")


def back(is_first=False):
    """It stopped when the swarm was at round 20, and starts again."""
    return joined(*HELD, extent=20, is_first=is_first)


def slept():
    """It fell asleep at round 20, and woke."""
    sealing = joined(*HELD)
    drive(sealing, 0.0, RETURN_S + 2 * LOOK_INTERVAL_S, clock=20, others=[()])
    sealing.came_back(18)
    return sealing


@pytest.mark.parametrize("is_first", [False, True])
def test_who_missed_rounds_that_the_swarm_has_closed_begins_anew(is_first):
    sealing, others = back(is_first), [LATER, LATER, ()]
    assert drive(sealing, 0.0, 2, clock=39, others=others) == [], "these are kept yet"
    effects = drive(sealing, 2.5, 5, clock=40, others=others)
    assert kinds(effects, Adopt) == [Adopt(claim(96))]
    (notice,) = kinds(effects, Notice)
    assert "we were away since round 20" in notice.text
    assert not sealing.claims, "it stands for nothing: two such could be most of a small swarm"
    sealing.adopted(claim(96))
    sealing.sealed((claim(96),))
    assert sealing.joined and sealing.knows_where_it_is and sealing.floor == 96


@pytest.mark.parametrize("others", [[], [HELD]], ids=["alone", "all were away"])
def test_who_comes_back_and_goes_on_by_itself_has_missed_nothing(others):
    """However fast its rounds are: nobody has gone on without it."""
    sealing = back()
    for tick in range(60):
        drive(sealing, tick / 2, 0, clock=20 + 2 * tick, others=others)
    assert sealing.knows_where_it_is and sealing.joined


@pytest.mark.parametrize(
    ("is_named", "stayed", "is_believed"),
    [(True, 0, True), (False, 0, False), (True, 21, False)],
    ids=["at a join address", "elsewhere", "others train on"],
)
def test_where_only_who_does_not_train_went_on_a_join_address_is_believed(is_named, stayed, is_believed):
    """A bootstrap peer, say, while those that trained with it are gone. It moves no clock."""
    sealing = back()
    observer = PeerClaim(LATER, b"observer", is_named)
    drive(sealing, 0.0, 10, clock=20, others=[observer, PeerClaim((claim(16),), b"back", round=stayed)])
    assert sealing.joined is not is_believed
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


@pytest.mark.parametrize("alone", [20, 23], ids=["waited", "went on by itself"])
def test_whose_network_comes_late_looks_once_it_hears_of_others(alone):
    """Its machine was faster than its router, say. If it published meanwhile, there are two histories."""
    sealing = back()
    assert drive(sealing, 0.0, 4 * RETURN_S, clock=alone) == []
    drive(sealing, 4 * RETURN_S + 0.5, limits.ROSTER_PATIENCE_S, clock=100, others=[LATER])
    assert sealing.joined is (alone != 20)


def test_the_first_to_be_heard_after_a_return_is_not_believed_alone():
    """It may be a liar, whose word about the clock is all there is for a moment."""
    sealing, liar = back(), (claim(5_000_000),)
    assert not drive(sealing, 0.0, 0, clock=5_000_000, others=[liar])
    assert not sealing.knows_where_it_is
    for tick in range(2 * int(RETURN_S)):
        assert not kinds(drive(sealing, 0.5 + tick / 2, 0, clock=22, others=[liar, HELD, HELD, HELD]), Adopt)
        assert sealing.joined and sealing.knows_where_it_is


@pytest.mark.parametrize(
    ("others", "meanwhile"),
    [
        ([FRIEND, FRIEND], lambda sealing: None),
        ([FRIEND], lambda sealing: sealing.came_back(98)),
        ([FRIEND], lambda sealing: sealing.sealed((claim(24), claim(16)))),
        ([FRIEND, PeerClaim(HELD, b"away", is_named=True)], lambda sealing: None),
    ],
    ids=[
        "as others say",
        "though it falls asleep again, and has heard of some rounds since",
        "though a snapshot of the history that it gave up was being written",
        "and not from the snapshot of one at its join address that was away too",
    ],
)
def test_who_slept_for_longer_than_rounds_are_kept_begins_anew(others, meanwhile):
    sealing = slept()
    sealing.came_back(18)  # it woke for half a minute, without a network: nobody was there
    effects = drive(sealing, 100.0, limits.ROSTER_PATIENCE_S, clock=100, others=others)
    assert not sealing.joined and not sealing.knows_where_it_is
    meanwhile(sealing)
    assert not sealing.joined
    effects += drive(sealing, 103.0, 10, clock=100, others=others)
    assert kinds(effects, Adopt) == [Adopt(claim(96))]


def test_who_has_been_in_the_swarm_for_a_while_has_missed_nothing():
    sealing = back()
    assert sealing.is_in_a_hurry
    drive(sealing, 0.0, RETURN_S + 2 * LOOK_INTERVAL_S, clock=22, others=[()])
    assert not sealing.is_in_a_hurry
    drive(sealing, 40.0, 10, clock=100, others=[LATER] * 2)
    assert sealing.joined


OWN = identity(0).node_id


class Beginner:
    """A node's catching up, and the machines that it watches."""

    def __init__(self, *, is_first: bool = False, signs: bool = True) -> None:
        info = NodeInfo(name="", trains=signs, incarnation=1, bootstrap=() if is_first else ("a:1",))
        context = replace(builders.context(), info=info)
        self.links, self.ledger = context.links, context.ledger
        self.anti_entropy = AntiEntropy(context, Announcer(context, set()))
        self.fetcher = Fetcher(lambda blob, size: None, context.rng, context.outbox)
        self.clock = SimpleNamespace(is_contradicted=False, read=lambda now: 0)
        self.catch_up = CatchUp(context, self.anti_entropy, self.fetcher.wants, cast(Any, self.clock))

    def hears_of(self, author: int, chunks: int, now: float) -> tuple[bytes, ...]:
        """A link says that it holds a delta's payload; returns the chunks."""
        blobs = tuple(f"{author}.{place}".encode() for place in range(chunks))
        delta = builders.unsigned(author, 1)
        self.ledger.add(delta)
        self.fetcher.want(delta.record_id, tuple((blob, 5) for blob in blobs), now)
        self.fetcher.hint(1, delta.record_id)
        return blobs

    def insists(self, now: float) -> None:
        """The link, no longer believed since it did not answer, says again that it holds everything."""
        self.fetcher.plan(now)
        for key in (*(delta.record_id for delta in self.ledger), b"root"):
            self.fetcher.hint(1, key)

    def is_done(self, now: float, *, has_signed: bool = False) -> bool:
        self.fetcher.plan(now)
        self.catch_up.observe(now)
        return self.catch_up.is_done(has_signed=has_signed)


@pytest.mark.parametrize("has_signed", [False, True])
def test_the_first_of_a_swarm_need_not_wait_until_somebody_comes(has_signed):
    node = Beginner(is_first=True)
    assert node.is_done(0.0, has_signed=has_signed)
    node.links.up(LinkUp(1, identity(1).node_id, False, None), 0.0)
    assert not node.is_done(0.0, has_signed=has_signed)


def test_a_joiner_waits_for_a_ledger_and_its_payloads_but_not_for_later_ones():
    node = Beginner()
    assert not node.is_done(10.0)
    node.fetcher.link_up(1, True)
    node.fetcher.want(b"early", ((b"chunk", 5),), 11.0)
    node.fetcher.hint(1, b"early")
    node.anti_entropy.synced_once = True
    assert not node.is_done(12.0)
    node.fetcher.want(b"late", ((b"other", 5),), 13.0)
    node.fetcher.hint(1, b"late")
    node.fetcher.arrived(b"chunk", 13.0)
    assert node.is_done(14.0)


@pytest.mark.parametrize(("honest", "is_minority"), [(3, True), (2, True), (1, False)])
def test_those_who_dribble_their_payloads_are_waited_for_only_where_they_are_most(honest, is_minority):
    """Half of the authors is as many as may: of two members, one of them hostile, nobody can tell which."""
    node = Beginner()
    node.fetcher.link_up(1, True)
    dribbled = [node.hears_of(author, 40, 1.0) for author in (1, 2)]
    served = [node.hears_of(author, 3, 1.0) for author in range(3, 3 + honest)]
    node.anti_entropy.synced_once = True
    assert not node.is_done(2.0)
    for blobs in served:
        for blob in blobs:
            node.fetcher.arrived(blob, 1.0)
    now = 3.0
    assert not node.is_done(now)
    for one, two in zip(*dribbled, strict=True):
        now += 1.0 + 0.7 * limits.PAYLOAD_PATIENCE_S
        node.insists(now)
        is_done = node.is_done(now)
        if is_done:
            break
        node.fetcher.arrived(one, now)
        node.fetcher.arrived(two, now)
    assert is_done == is_minority
    if is_minority:
        assert now < 3.0 + 2 * limits.PAYLOAD_PATIENCE_S


def test_payloads_of_which_nothing_comes_are_not_waited_for():
    """Whoever says again and again that it holds them may be a liar."""
    node = Beginner()
    node.fetcher.link_up(1, True)
    node.hears_of(1, 2, 1.0)
    node.anti_entropy.synced_once = True
    start = now = 2.0
    while not node.is_done(now) and now < start + 2 * limits.PAYLOAD_PATIENCE_S:
        now += 1.0
        node.insists(now)
    assert start + limits.PAYLOAD_PATIENCE_S < now < start + limits.PAYLOAD_PATIENCE_S + 5.0


def test_a_snapshot_under_way_is_nobodys_payload_and_waited_for():
    node = Beginner()
    node.fetcher.link_up(1, True)
    node.hears_of(1, 3, 1.0)
    for author in (2, 3):
        for blob in node.hears_of(author, 1, 1.0):
            node.fetcher.arrived(blob, 1.0)
    chunks = [f"s{place}".encode() for place in range(9)]
    node.fetcher.want(b"root", tuple((chunk, 5) for chunk in chunks), 1.0)
    node.fetcher.hint(1, b"root")
    node.anti_entropy.synced_once = True
    now = 2.0
    for chunk in chunks:
        node.insists(now)
        assert not node.is_done(now)
        node.fetcher.arrived(chunk, now)
        now += 0.9 * limits.PAYLOAD_PATIENCE_S


def test_a_joiner_that_finds_nobody_waits_on():
    node = Beginner()
    assert not node.is_done(0.0)
    assert not node.is_done(1e6)


def test_who_has_signed_waits_for_a_ledger_or_for_a_while():
    node = Beginner()
    assert not node.is_done(50.0, has_signed=True)
    assert not node.is_done(50.0 + limits.RESUME_PATIENCE_S, has_signed=True)
    assert node.is_done(50.1 + limits.RESUME_PATIENCE_S, has_signed=True)
    node = Beginner()
    node.anti_entropy.synced_once = True
    node.fetcher.want(b"early", ((b"chunk", 5),), 50.0)
    assert node.is_done(51.0, has_signed=True), "payloads can come later"


def test_who_signs_nothing_waits_for_others_only_for_a_while():
    node = Beginner(signs=False)
    assert not node.is_done(50.0)
    assert not node.is_done(50.0 + limits.RESUME_PATIENCE_S)
    assert node.is_done(50.1 + limits.RESUME_PATIENCE_S)
    node.links.up(LinkUp(1, identity(1).node_id, False, None), 90.0)
    assert not node.is_done(90.0), "somebody is there to learn from"
    node.links.down(1)
    assert not node.is_done(90.0 + limits.RESUME_PATIENCE_S), "a link that breaks may come again"
    assert node.is_done(90.1 + limits.RESUME_PATIENCE_S)


@pytest.mark.parametrize("is_set", [True, False])
def test_a_clock_that_is_wrong_is_waited_for_but_not_for_ever(is_set):
    node = Beginner()
    node.anti_entropy.synced_once = node.clock.is_contradicted = True  # an exchange in which all was refused
    assert not node.is_done(10.0)
    assert not node.is_done(10.0 + limits.CLOCK_PATIENCE_S)
    assert not node.anti_entropy.synced_once, "it is asked for again"
    node.clock.is_contradicted = not is_set
    now = 12.0 + limits.CLOCK_PATIENCE_S
    assert not node.is_done(now)
    node.anti_entropy.synced_once = True
    assert node.is_done(now + 2.0)
