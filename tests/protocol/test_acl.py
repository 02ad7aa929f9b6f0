"""The access list is a set: who takes part depends on what owners signed, never on when it was heard of."""

from __future__ import annotations

import random
from base64 import urlsafe_b64encode
from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.access import acl as acl_module
from gossamer.protocol.access.acl import (
    INVITATION_BYTES_MAX,
    PREFIX,
    STRANGER_INTERVAL_S,
    Access,
    AccessList,
    Grant,
    Invitation,
    Revocation,
    Role,
    parse_grant,
    read_invitation,
)
from gossamer.protocol.effects import Hangup, Outbox, Send
from gossamer.protocol.errors import ConfigError, NoRoomError, PeerError, RefusedError, SignatureError
from gossamer.protocol.events import LinkUp
from gossamer.protocol.identity import Identity, short
from gossamer.protocol.limits import ADDRESSES_PER_PEER_MAX
from gossamer.protocol.membership.links import Links
from gossamer.protocol.membership.members import Roster
from gossamer.protocol.records import RecordKind, open_envelope, seal
from gossamer.protocol.unix_time import UnixTime
from gossamer.protocol.wire import pack
from tests.protocol import builders
from tests.protocol.builders import OWNER, grant, identity, revocation

SECOND_OWNER = identity(901)
INVITED = builders.manifest(admission=builders.admission("invited", OWNER, SECOND_OWNER))
OPEN = builders.manifest(admission=builders.admission("open"))
ALICE, BOB, STRANGER = identity(1), identity(2), identity(3)
NODES = (ALICE, BOB, STRANGER)


def acl(*records: bytes, of=INVITED) -> AccessList:
    made = AccessList(of.admission, of.swarm_id)
    for data in records:
        made.learn(data)
    return made


@dataclass(frozen=True)
class Meaning:
    """All that anybody can ask of a access list, without a clock."""

    ids: tuple[bytes, ...]
    digest: bytes
    roles: tuple[Role | None, ...]
    counts: tuple[bool, ...]
    datas: frozenset[bytes]


def meaning(of: AccessList) -> Meaning:
    return Meaning(
        of.ids(),
        of.digest,
        tuple(of.role_of(node.node_id) for node in NODES),
        tuple(of.counts(node.node_id, round_) for node in NODES for round_ in range(1, 8)),
        frozenset(record.data for record in of.records()),
    )


@st.composite
def credentials(draw: st.DrawFn) -> bytes:
    node = draw(st.sampled_from(NODES))
    by = draw(st.sampled_from((OWNER, SECOND_OWNER)))
    issued = draw(st.integers(0, 1))
    if draw(st.integers(0, 3)):
        role = draw(st.sampled_from(Role))
        expires = draw(st.sampled_from((0, 10, 20, 30)))
        return grant(node, INVITED, role=role, expires=expires, issued=issued, by=by)
    return revocation(node, INVITED, last_round=draw(st.integers(0, 5)), issued=issued, by=by)


RECORDS = st.lists(credentials(), max_size=14)


# --- a semilattice ----------------------------------------------------------------------------------


@given(RECORDS, st.randoms(use_true_random=False))
def test_any_order_with_any_repetition_means_the_same(records, rng):
    again = records + [rng.choice(records) for _ in records]
    rng.shuffle(again)
    assert meaning(acl(*records)) == meaning(acl(*again))


@given(RECORDS, RECORDS)
def test_what_is_in_force_is_all_that_need_be_told(one, other):
    """Two access lists that exchange what they keep equal one that heard everything."""
    left, right = acl(*one), acl(*other)
    from_left = [record.data for record in left.records()]
    for record in list(right.records()):
        left.learn(record.data)
    for data in from_left:
        right.learn(data)
    assert meaning(left) == meaning(right) == meaning(acl(*one, *other))


@given(RECORDS)
def test_a_record_counts_whatever_the_time_and_more_grants_never_void_one(records):
    grants = [data for data in records if data[0] == RecordKind.GRANT]
    before, after = acl(*grants[:-1]), acl(*grants)
    for node in NODES:
        for round_ in (1, 2**31 - 1):
            assert before.counts(node.node_id, round_) <= after.counts(node.node_id, round_)


# --- grants -----------------------------------------------------------------------------------------


def test_nobody_is_let_in_before_an_owner_says_so():
    made = acl()
    assert not made.is_open and made.owners
    assert made.role_of(ALICE.node_id) is None
    assert not made.counts(ALICE.node_id, 1)
    with pytest.raises(RefusedError, match=ALICE.node_id.hex()):
        made.vet(ALICE.node_id, 0.0)


@pytest.mark.parametrize("role", Role)
def test_a_role_lets_in_and_only_one_of_them_publishes(role):
    made = acl(grant(ALICE, INVITED, role=role))
    assert made.role_of(ALICE.node_id) is role
    assert made.counts(ALICE.node_id, 1) == (role is Role.TRAIN)
    made.vet(ALICE.node_id, 1e12)
    with pytest.raises(RefusedError):
        made.vet(BOB.node_id, 0.0)


def test_a_longer_grant_replaces_a_shorter_one_and_a_higher_role_a_lower():
    short = grant(ALICE, INVITED, expires=10)
    long_ = grant(ALICE, INVITED, expires=20)
    forever = grant(ALICE, INVITED)
    made = acl(short)
    assert isinstance(made.learn(long_), Grant)
    assert made.learn(short) is None
    made.learn(forever)
    assert {record.data for record in made.records()} == {forever}
    assert made.learn(grant(ALICE, INVITED, role=Role.OBSERVE)) is None


def test_an_expired_grant_closes_doors_and_takes_nothing_back():
    made = acl(grant(ALICE, INVITED, expires=100))
    made.vet(ALICE.node_id, 99.9)
    with pytest.raises(RefusedError, match=r"ran out 2\.0 days ago"):
        made.vet(ALICE.node_id, 100 + 2 * 86400)
    assert made.counts(ALICE.node_id, 1)
    assert made.role_of(ALICE.node_id) is Role.TRAIN
    assert made.credential_of(ALICE.node_id, 100.0) == b""


# --- what is shown at a door --------------------------------------------------------------------------


def test_a_credential_opens_the_door_and_is_not_learned_by_that():
    made = acl()
    shown = grant(ALICE, INVITED, expires=100)
    made.vet(ALICE.node_id, 50.0, shown)
    assert made.ids() == ()
    with pytest.raises(RefusedError, match="ran out"):
        made.vet(ALICE.node_id, 100.0, shown)
    with pytest.raises(RefusedError, match="invited nodes only"):
        made.vet(BOB.node_id, 50.0, shown)
    with pytest.raises(RefusedError, match="invited nodes only"):
        made.vet(ALICE.node_id, 50.0, revocation(ALICE, INVITED))


@pytest.mark.parametrize(
    "shown",
    [b"x", bytes(limits.CREDENTIAL_BYTES_MAX), grant(ALICE, INVITED, by=STRANGER), grant(ALICE, OPEN)],
    ids=["junk", "zeros", "by a stranger", "of another swarm"],
)
def test_a_credential_that_is_worth_nothing(shown):
    with pytest.raises(RefusedError, match="is not valid") as error:
        acl().vet(ALICE.node_id, 0.0, shown)
    assert str(error.value).isprintable()


# --- revocations --------------------------------------------------------------------------------------


def test_a_revoked_node_is_out_and_its_later_rounds_are_void():
    made = acl(grant(ALICE, INVITED), revocation(ALICE, INVITED, last_round=4, reason="key stolen"))
    assert made.role_of(ALICE.node_id) is None
    assert [made.counts(ALICE.node_id, round_) for round_ in (3, 4, 5, 6)] == [True, True, False, False]
    with pytest.raises(RefusedError, match="was revoked by an owner of this swarm: key stolen"):
        made.vet(ALICE.node_id, 0.0, grant(ALICE, INVITED, issued=7))
    made.learn(grant(ALICE, INVITED, issued=9))
    assert made.role_of(ALICE.node_id) is None, "for good"


def test_no_grant_of_a_revoked_node_is_taken_from_an_owner():
    made = acl(revocation(ALICE, INVITED, reason="key stolen"))
    with pytest.raises(RefusedError, match="was revoked by an owner of this swarm: key stolen"):
        made.check_of_use(grant(ALICE, INVITED))
    made.check_of_use(grant(BOB, INVITED))
    made.check_of_use(revocation(ALICE, INVITED))


def test_of_several_revocations_the_one_that_voids_most_stays():
    late, early = revocation(ALICE, INVITED, last_round=9), revocation(ALICE, INVITED, last_round=2)
    made = acl(grant(ALICE, INVITED), late)
    assert isinstance(made.learn(early), Revocation)
    assert made.learn(late) is None
    assert not made.counts(ALICE.node_id, 3)
    found = made.revocation_of(ALICE.node_id)
    assert found is not None and found.data == early


def test_in_an_open_swarm_all_may_train_but_those_revoked():
    made = acl(of=OPEN)
    assert made.is_open and made.role_of(STRANGER.node_id) is Role.TRAIN
    made.vet(STRANGER.node_id, 0.0)
    made.vet(STRANGER.node_id, 0.0, b"whatever it shows")
    made.learn(revocation(STRANGER, OPEN, last_round=3))
    assert made.counts(STRANGER.node_id, 3) and not made.counts(STRANGER.node_id, 4)
    with pytest.raises(RefusedError, match="revoked"):
        made.vet(STRANGER.node_id, 0.0)


# --- hostile input --------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [STRANGER, ALICE], ids=["a stranger", "itself"])
@pytest.mark.parametrize("make", [grant, revocation])
def test_only_owners_are_believed(by, make):
    made = acl(grant(ALICE, INVITED))
    before = meaning(made)
    with pytest.raises(SignatureError, match="not an owner"):
        made.learn(make(ALICE, INVITED, by=by))
    assert meaning(made) == before


def test_without_owners_there_is_nothing_to_learn():
    made = acl(of=builders.SMALL)
    assert not made.owners
    with pytest.raises(SignatureError):
        made.learn(grant(ALICE, builders.SMALL))


def test_who_is_no_owner_costs_us_no_signature_check(monkeypatch):
    monkeypatch.setattr(acl_module, "open_envelope", lambda *_: pytest.fail("a signature was checked"))
    with pytest.raises(SignatureError):
        acl().learn(grant(ALICE, INVITED, by=STRANGER))


def _sealed(kind: RecordKind, body: bytes, by: Identity = OWNER) -> bytes:
    return seal(by, kind, INVITED.swarm_id, body).data


@pytest.mark.parametrize(
    "data",
    [
        _sealed(RecordKind.GRANT, pack([])),
        _sealed(RecordKind.GRANT, pack([ALICE.node_id, 0, 0, 0])),
        _sealed(RecordKind.GRANT, pack([ALICE.node_id, 3, 0, 0])),
        _sealed(RecordKind.GRANT, pack([ALICE.node_id, 2, 0, -1])),
        _sealed(RecordKind.GRANT, pack([ALICE.node_id, 2, 0, 2**40 + 1])),
        _sealed(RecordKind.GRANT, pack([ALICE.node_id, 2, 0, 0.5])),
        _sealed(RecordKind.GRANT, pack([ALICE.node_id[:31], 2, 0, 0])),
        _sealed(RecordKind.GRANT, pack([ALICE.node_id, 2, 0, 0, 0])),
        _sealed(RecordKind.REVOCATION, pack([ALICE.node_id, -1, 0, ""])),
        _sealed(RecordKind.REVOCATION, pack([ALICE.node_id, 2**31, 0, ""])),
        _sealed(RecordKind.REVOCATION, pack([ALICE.node_id, 1, 0, "two\nlines"])),
        _sealed(RecordKind.REVOCATION, pack([ALICE.node_id, 1, 0, "r" * (limits.REASON_BYTES_MAX + 1)])),
        _sealed(RecordKind.MEMBER, pack([ALICE.node_id, 2, 0, 0])),
        _sealed(RecordKind.GRANT, bytes(limits.CREDENTIAL_BYTES_MAX)),
        b"",
    ],
)
def test_a_record_out_of_bounds(data):
    made = acl()
    with builders.refusing(PeerError), pytest.raises(PeerError):
        made.learn(data)
    assert made.ids() == ()


def test_the_acl_speaks_of_so_many_nodes_and_no_more(monkeypatch):
    monkeypatch.setattr(limits, "ACL_NODES_MAX", 2)
    made = acl(grant(ALICE, INVITED), revocation(BOB, INVITED))
    for data in (grant(STRANGER, INVITED), revocation(STRANGER, INVITED)):
        with pytest.raises(NoRoomError, match="more nodes"):
            made.learn(data)
    made.vet(ALICE.node_id, 0.0, grant(ALICE, INVITED, expires=100))
    with pytest.raises(RefusedError, match=f"there is no room for node {short(STRANGER.node_id)}"):
        made.vet(STRANGER.node_id, 0.0, grant(STRANGER, INVITED))
    assert made.learn(revocation(ALICE, INVITED)) is not None, "of those known there may be more"


def test_until_when_a_node_is_invited():
    one, open_, node = acl(), acl(of=OPEN), identity(1)
    assert one.invited_until(node.node_id) is None
    for role, expires in ((Role.OBSERVE, 90), (Role.TRAIN, 50)):
        one.learn(grant(node, INVITED, role=role, expires=expires))
        open_.learn(grant(node, OPEN, role=role, expires=expires))
        assert one.invited_until(node.node_id) == expires
    one.learn(grant(node, INVITED))
    assert one.invited_until(node.node_id) is None is open_.invited_until(node.node_id)


# --- access lists become the same over the links; whose grant has run out is cut

POOL = [grant(identity(n), INVITED, expires=e) for n in range(4) for e in (0, 10)]
POOL += [revocation(identity(n), INVITED, last_round=r) for n in range(3) for r in (1, 2)]
SETS = st.lists(st.sampled_from(POOL), max_size=8)


class End:
    """One node's access list and vetting, with links to all others; link n leads to node n."""

    def __init__(self, number: int, of=INVITED) -> None:
        self.number, outbox = number, Outbox()
        self.acl = AccessList(of.admission, of.swarm_id)
        own = identity(100 + number).node_id
        self.links = Links(own, Roster(own), builders.NOBODY, random.Random(number), outbox)
        access = Access(self.acl, self.links, random.Random(number), UnixTime(1000.0), outbox)
        self.access = builders.Drained(access, outbox)

    def link_to(self, other: int) -> list[Send]:
        self.links.up(LinkUp(other, identity(100 + other).node_id, True, None), 0.0)
        return self.access.link_up(other)

    def hear(self, link: int, message: msg.Message) -> list[Send]:
        if isinstance(message, msg.AclSummary):
            return self.access.exchange(link, message)
        result: list[Send] = []
        for data, _ in message.entries:
            record = self.acl.learn(data)
            result += self.access.spread(record, source=link) if record else []
        return result


def converge(ends: list[End], opening: list[tuple[int, Send]]) -> int:
    """Deliver, over the wire format, until nothing is under way; returns how many messages it took."""
    queue, count = deque(opening), 0
    while queue:
        source, send = queue.popleft()
        count += 1
        assert count < 1000, "they talk for ever"
        message = msg.decode(msg.encode(send.message))
        queue += [(send.link, answer) for answer in ends[send.link].hear(source, message)]
    return count


@given(SETS, SETS)
def test_two_access_lists_become_one_in_five_messages(one, other):
    ends = [End(0), End(1)]
    for end, records in zip(ends, (one, other), strict=True):
        for data in records:
            end.acl.learn(data)
    equal = ends[0].acl.digest == ends[1].acl.digest
    ends[0].links.up(LinkUp(1, identity(101).node_id, True, None), 0.0)
    ends[1].links.up(LinkUp(0, identity(100).node_id, True, None), 0.0)
    count = converge(ends, [(0, send) for send in ends[0].access.link_up(1)])
    assert ends[0].acl.ids() == ends[1].acl.ids()
    assert count <= (1 if equal else 5)
    assert converge(ends, [(0, send) for send in ends[0].access.link_up(1)]) == 1


def test_a_link_that_brings_strangers_is_asked_now_and_then():
    end = End(0)
    for other in (1, 2):
        end.link_to(other)
    assert [send.link for send in end.access.stranger(1, 50.0)] == [1]
    assert end.access.stranger(1, 50.0 + STRANGER_INTERVAL_S / 2) == []
    assert [send.link for send in end.access.stranger(2, 50.1)] == [2]
    assert [send.link for send in end.access.stranger(1, 50.0 + STRANGER_INTERVAL_S)] == [1]
    assert sorted(end.access.met_strangers()) == [1, 2]
    assert end.access.met_strangers() == []
    end.access.stranger(1, 60.0)
    end.access.link_down(1)
    assert end.access.met_strangers() == []


def test_whose_grant_has_run_out_is_cut():
    """Grants are in Unix seconds: 1000 more than this clock shows."""
    end = End(0)
    for other, expires in ((1, 1110), (2, 0)):
        end.link_to(other)
        end.acl.learn(grant(identity(100 + other), INVITED, expires=expires))
    assert [e for e in end.access.wake(109.0) if isinstance(e, Hangup)] == []
    hangups = [e for e in end.access.wake(109.0 + limits.EXPIRY_CHECK_INTERVAL_S) if isinstance(e, Hangup)]
    assert [hangup.link for hangup in hangups] == [1]
    assert "ran out" in hangups[0].reason
    end.acl.learn(grant(identity(101), INVITED, expires=2000))
    assert [e for e in end.access.wake(130.0) if isinstance(e, Hangup)] == [], "renewed in time"


def test_a_machine_that_slept_knows_what_time_it_is():
    """The clock that events carry stands still meanwhile."""
    end = End(0)
    end.link_to(1)
    end.acl.learn(grant(identity(101), INVITED, expires=5000))
    assert [e for e in end.access.wake(109.0) if isinstance(e, Hangup)] == []
    end.access._unix_time.set_offset(10_000.0)
    hangups = [e for e in end.access.wake(109.0 + limits.EXPIRY_CHECK_INTERVAL_S) if isinstance(e, Hangup)]
    assert [hangup.link for hangup in hangups] == [1]


# --- an invitation survives mail and chat, or is refused in one line


def invitation(*contacts: str) -> Invitation:
    data = grant(ALICE, INVITED, role=Role.OBSERVE, expires=5)
    return Invitation(INVITED.swarm_id, parse_grant(open_envelope(data, INVITED.swarm_id)), contacts)


def text_of(*fields: object) -> str:
    return PREFIX + urlsafe_b64encode(pack(list(fields))).decode()


@pytest.mark.parametrize("contacts", [(), ("a:1",), ("a:1", f"gossamer://{ALICE.node_id.hex()}@b:2")])
def test_round_trip(contacts):
    made = invitation(*contacts)
    assert read_invitation(made.to_text()) == made
    assert made.to_text().isascii() and " " not in made.to_text()


@given(st.lists(st.integers(0, 300), max_size=6), st.sampled_from(["\n", " ", "\r\n  ", "\t"]))
def test_mail_may_break_it_anywhere(places, gap):
    text = whole = invitation("host:7700").to_text()
    for place in places:
        text = text[:place] + gap + text[place:]
    assert read_invitation(f"{gap}{text}{gap}") == read_invitation(whole)


@given(st.data())
def test_a_piece_of_it_is_said_to_be_damaged(data):
    text = invitation("host:7700").to_text()
    cut = data.draw(st.integers(0, len(text) - 2))
    with pytest.raises(ConfigError) as error:
        read_invitation(text[:cut])
    assert str(error.value).isprintable()


@pytest.mark.parametrize("text", ["", "hello", PREFIX[:-1], "x" + PREFIX, PREFIX.upper() + "AAAA"])
def test_what_is_no_invitation(text):
    with pytest.raises(ConfigError, match=f"that is not an invitation; one begins with {PREFIX}"):
        read_invitation(text)


@pytest.mark.parametrize(
    "text",
    [
        PREFIX,
        PREFIX + "ä",
        PREFIX + "AAAA",
        text_of(INVITED.swarm_id, grant(ALICE, builders.SMALL), []),
        text_of(INVITED.swarm_id, grant(ALICE, INVITED)),
        text_of(INVITED.swarm_id, grant(ALICE, INVITED), ["two\nlines"]),
        text_of(INVITED.swarm_id, grant(ALICE, INVITED), ["a:1"] * (ADDRESSES_PER_PEER_MAX + 1)),
        text_of(INVITED.swarm_id, grant(ALICE, INVITED), [], 1),
        text_of(INVITED.swarm_id[:31], grant(ALICE, INVITED), []),
    ],
)
def test_what_is_damaged(text):
    with pytest.raises(ConfigError, match="damaged") as error:
        read_invitation(text)
    assert str(error.value).isprintable()


def test_what_grants_nothing_or_is_without_end():
    with pytest.raises(ConfigError, match="grants nothing"):
        read_invitation(text_of(INVITED.swarm_id, revocation(ALICE, INVITED), []))
    with pytest.raises(ConfigError, match="not an invitation"):
        read_invitation(PREFIX + "A" * INVITATION_BYTES_MAX)
