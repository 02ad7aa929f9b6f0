"""The access list is a set: who takes part depends on what owners signed, never on when it was heard of."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol import limits
from gossamer.protocol.access import acl as acl_module
from gossamer.protocol.access.acl import NEVER, AccessList, Grant, Revocation, Role
from gossamer.protocol.errors import NoRoomError, PeerError, RefusedError, SignatureError
from gossamer.protocol.identity import Identity, short
from gossamer.protocol.records import RecordKind, seal
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
        expires = draw(st.sampled_from((NEVER, 10, 20, 30)))
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


@given(RECORDS)
def test_what_is_kept_is_bounded(records):
    made = acl(*records)
    grants = [record for record in made.records() if isinstance(record, Grant)]
    for node in NODES:
        mine = [record for record in grants if record.node_id == node.node_id]
        assert len(mine) <= 1
    assert len(made.ids()) <= limits.ACL_RECORDS_MAX


# --- grants -----------------------------------------------------------------------------------------


def test_nobody_is_let_in_before_an_owner_says_so():
    made = acl()
    assert not made.is_open and made.has_owners
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
    assert not made.has_owners
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


@given(st.data())
def test_any_flipped_bit_is_found(data):
    record = data.draw(credentials())
    wrong = bytearray(record)
    bit = data.draw(st.integers(0, 8 * len(wrong) - 1))
    wrong[bit // 8] ^= 1 << bit % 8
    made = acl()
    with pytest.raises(PeerError):
        made.learn(bytes(wrong))
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


@pytest.mark.parametrize(
    ("end", "said"), [(1_000_000, "1970-01-12 13:46 UTC"), (limits.UNIX_S_MAX, "36812-02-20 00:36 UTC")]
)
def test_until_when_it_held_shows_whose_clock_is_wrong(end, said):
    """Both sides read it, and only one of them can be right."""
    one = acl(grant(identity(1), INVITED, expires=end))
    with pytest.raises(RefusedError, match=f"it was valid until {said}"):
        one.vet(identity(1).node_id, end + 1)


def test_until_when_a_node_is_invited():
    one, open_, node = acl(), acl(of=OPEN), identity(1)
    assert one.invited_until(node.node_id) is None
    for role, expires in ((Role.OBSERVE, 90), (Role.TRAIN, 50)):
        one.learn(grant(node, INVITED, role=role, expires=expires))
        open_.learn(grant(node, OPEN, role=role, expires=expires))
        assert one.invited_until(node.node_id) == expires
    one.learn(grant(node, INVITED))
    assert one.invited_until(node.node_id) is None is open_.invited_until(node.node_id)
