"""Whole cores in a swarm with owners: the invited train together, and nobody else hears a word."""

from __future__ import annotations

import numpy as np
import pytest

from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.access.acl import Role
from gossamer.protocol.errors import Offence, PeerError, SignatureError
from gossamer.protocol.events import LinkUp
from gossamer.protocol.identity import short
from gossamer.protocol.records import RecordKind, seal
from gossamer.protocol.wire import pack
from tests.protocol import builders
from tests.protocol.builders import OWNER, grant, identity, revocation
from tests.protocol.wiring import Node, Weather, World

PACE = {"every_steps": 4, "min_round_seconds": 0.05}
INVITED = builders.manifest(admission=builders.admission(), pace=PACE)
OPEN = builders.manifest(admission=builders.admission("open"), pace=PACE)
UNIX_S = builders.CREATED + 3600
"""Unix time at 0 on a World's clock."""


def _invited(number: int, **changes: object) -> bytes:
    return grant(identity(number), INVITED, **changes)


def _swarm(seed: int, count: int, weather: Weather | None = None) -> World:
    """An invited swarm: each node was given its own grant and nobody else's."""
    world = World(seed, INVITED, weather)
    for number in range(count):
        world.add(number, [0] if number else [], credentials=[_invited(number)])
    world.run(12.0)
    return world


def _give(world: World, node: Node, *records: bytes) -> list[fx.Effect]:
    """Bytes over one of a node's links."""
    entries = tuple((data, False) for data in records)
    return world.inject(node, next(iter(node.links)), msg.encode(msg.Records(entries)))


def _authors(node: Node) -> set[int]:
    return {n for n in range(100) if identity(n).node_id in {d.author for d in node.core.ledger}}


# --- the invited ------------------------------------------------------------------------------------


def test_the_uninvited_are_refused_and_hear_nothing(seed):
    world = _swarm(seed, 3)
    world.publish(world.nodes[0])
    stranger = world.add(9, [0, 1, 2])
    forger = world.add(8, [0], credentials=[grant(identity(8), INVITED, by=identity(8))])
    world.run(30.0)
    for outsider in (stranger, forger):
        assert outsider.refused and set(outsider.refused) == {
            "this swarm lets in invited nodes only; send an owner this node id for gossamer invite: "
            + outsider.identity.node_id.hex()
        }
        assert not outsider.links
        assert len(outsider.core.ledger) == 0 and outsider.core.roster.members() == []
    for node in world.nodes.values():
        assert node.core.roster.get(stranger.identity.node_id) is None


def test_an_invitation_that_ran_out_cuts_and_a_renewed_one_restores(seed):
    world = World(seed, INVITED)
    until = UNIX_S + 140  # the world begins at 100
    for number in range(3):
        expires = until if number == 2 else 0
        world.add(number, [0] if number else [], credentials=[_invited(number, expires=expires)])
    world.run(20.0)
    guest = world.nodes[2]
    world.publish(guest)
    world.run(5.0)
    assert guest.links
    world.run(40.0 + limits.EXPIRY_CHECK_INTERVAL_S - 20.0)
    assert not guest.links
    assert "ran out" in (world.run(10.0), guest.refused[-1])[1]
    for number in (0, 1):
        assert _authors(world.nodes[number]) == {2}, "what it did in its time stays"
    world.handle(world.nodes[1], ev.Deliver(_invited(2, expires=until + 10**6)))
    world.run(20.0, world.agree)
    assert guest.links and world.agree()


def test_an_observer_holds_all_and_publishes_nothing(seed):
    world = World(seed, INVITED)
    for number in range(3):
        role = Role.OBSERVE if number == 2 else Role.TRAIN
        mine = _invited(number, role=role)
        world.add(number, [0] if number else [], trains=number < 2, credentials=[mine])
    world.run(12.0)
    observer = world.nodes[2]
    world.publish(world.nodes[0])
    world.publish(observer)
    world.run(5.0)
    assert _authors(observer) == {0} and observer.held()
    assert any("invited to observe" in notice for notice in observer.notices)
    forged, _ = builders.random_delta(np.random.default_rng(0), observer.identity, 1, of=INVITED)
    effects = _give(world, world.nodes[1], forged.data)
    assert not [e for e in effects if isinstance(e, fx.Store)]
    assert not [e for e in effects if isinstance(e, fx.Send) and isinstance(e.message, msg.Records)]
    assert _authors(world.nodes[1]) == {0}


def test_records_before_their_authors_grant_are_caught_up_on(seed):
    """A member that missed the grant passes the records over, asks for it, and then for them."""
    world = _swarm(seed, 2)
    deaf, teller = world.nodes[0], world.nodes[1]
    newcomer = identity(7)
    delta, payload = builders.random_delta(np.random.default_rng(seed), newcomer, 1, of=INVITED)
    row = builders.row(newcomer, of=INVITED)
    effects = _give(world, deaf, delta.data, row.data)
    assert not [e for e in effects if isinstance(e, fx.Store)]
    asked = [e.message for e in effects if isinstance(e, fx.Send)]
    assert asked == [msg.AclSummary(deaf.core.acl.digest)], "once, for both"
    assert delta.record_id not in deaf.core.ledger
    assert deaf.core.roster.get(newcomer.node_id) is None
    # The other end has the grant and the records; what it said of the grant was lost.
    teller.core.acl.learn(grant(newcomer, INVITED))
    teller.blobs[delta.body.chunks[0]] = payload
    world.inject(teller, next(iter(teller.links)), msg.encode(msg.Records(((delta.data, True),))))
    world.run(5.0, lambda: delta.record_id in deaf.held())
    assert delta.record_id in deaf.held()
    world.run(10.0)
    assert deaf.core.roster.get(newcomer.node_id) is None or teller.core.roster.get(newcomer.node_id)
    assert not deaf.blames


# --- revocations ------------------------------------------------------------------------------------


def test_a_revocation_reaches_all_at_once_and_cuts_links(seed):
    world = _swarm(seed, 5)
    outcast = world.nodes[4]
    for number in range(5):
        world.publish(world.nodes[number], 1)
    world.run(3.0)
    world.handle(world.nodes[1], ev.Deliver(revocation(outcast.identity, INVITED, reason="key stolen")))
    world.run(1.0)
    assert outcast.expelled == "an owner of this swarm has revoked this node: key stolen"
    for number in range(4):
        node = world.nodes[number]
        assert _authors(node) == {0, 1, 2, 3}
        assert not node.core.holds(outcast.disk[0].record_id)
        who = f"{outcast.info.name} ({short(outcast.identity.node_id)})"
        assert any(notice.startswith(f"{who} was revoked by an owner") for notice in node.notices)
    world.run(10.0)
    assert not outcast.links
    assert "key stolen" in outcast.refused[-1]


def test_what_the_revoked_still_send_is_dropped(seed):
    """Whoever relays it has not heard of the revocation: it is asked to compare lists, and not blamed."""
    world = _swarm(seed, 3)
    outcast, member = world.nodes[2].identity, world.nodes[0]
    world.handle(member, ev.Deliver(revocation(outcast, INVITED, last_round=5)))
    world.run(2.0)
    rng = np.random.default_rng(seed)
    early, late = (builders.random_delta(rng, outcast, round_, of=INVITED)[0] for round_ in (5, 6))
    row = builders.row(outcast, of=INVITED, heartbeat=10**6)
    effects = _give(world, member, late.data, row.data)
    assert [type(effect.message) for effect in effects] == [msg.AclSummary]
    assert late.record_id not in member.core.ledger
    assert member.core.roster.get(outcast.node_id) is None
    assert [e.delta for e in _give(world, member, early.data) if isinstance(e, fx.Store)] == [early]


def test_nothing_is_resurrected_by_a_restart(seed):
    """The disk holds what was voided, since Phi may: its round is merged again, and closed."""
    world = _swarm(seed, 3)
    for number in range(3):
        world.publish(world.nodes[number], 1)
    world.run(3.0)
    node = world.nodes[0]
    world.handle(node, ev.Deliver(revocation(identity(2), INVITED)))
    (voided,) = (d for d in node.disk if d.author == identity(2).node_id)
    world.crash(node)
    world.restart(node)
    assert _authors(node) == {0, 1}
    assert voided.record_id not in node.core.ledger
    world.run(5.0)
    assert world.agree() and node.core.merges.waiting(1) == [1]
    for floor in (1, 2):
        node.core.holdings.close(floor)
    closed = [effect.deltas for effect in node.core.outbox.drain()]
    assert [voided in deltas for deltas in closed] == [True, False]


def test_a_node_never_signs_a_round_again_that_does_not_count(seed):
    """It lost its grants from disk, and what it signed counts no more for itself."""
    world = World(seed, INVITED)
    node = world.add(0, credentials=[_invited(0)])
    world.publish(node, 3)
    world.run(1.0)
    world.crash(node)
    node.credentials.clear()
    world.restart(node)
    assert len(node.core.ledger) == 0 and node.core.own_last == 3
    world.handle(node, ev.Deliver(_invited(0)))
    world.publish(node, 3)
    assert any("not signing round 3 again" in notice for notice in node.notices)


def test_in_an_open_swarm_an_owner_can_revoke(seed):
    world = World(seed, OPEN)
    for number in range(3):
        world.add(number, [0] if number else [])
    world.run(12.0)
    for number in range(3):
        world.publish(world.nodes[number], 1)
    world.run(3.0)
    world.handle(world.nodes[0], ev.Deliver(revocation(identity(1), OPEN)))
    world.run(3.0)
    assert _authors(world.nodes[2]) == {0, 2}
    world.run(10.0)
    assert not world.nodes[1].links and "was revoked" in world.nodes[1].refused[-1]


# --- one core, hostile input ------------------------------------------------------------------------


@pytest.fixture
def member(seed) -> tuple[World, Node]:
    world = _swarm(seed, 2)
    return world, world.nodes[0]


def test_a_credential_from_nobody_is_an_error_for_who_delivers_and_a_blame_for_a_peer(member):
    world, node = member
    for data in (grant(identity(5), INVITED, by=identity(5)), b"", b"\3", bytes(200)):
        with pytest.raises(PeerError):
            node.core.handle(ev.Deliver(data), world.now)
    with pytest.raises(SignatureError):
        node.core.handle(ev.Deliver(grant(identity(5), INVITED, by=identity(5))), world.now)
    effects = _give(world, node, grant(identity(5), INVITED, by=identity(5)))
    assert [type(e) for e in effects] == [fx.Blame]
    assert len(node.core.acl.ids()) == 2


def test_what_an_owner_signed_is_no_offence_of_those_who_hand_it_on(member):
    """They do so with every comparison of access lists, if it is of a later release."""
    world, node = member
    for kind in (RecordKind.GRANT, RecordKind.REVOCATION):
        later = seal(OWNER, kind, INVITED.swarm_id, pack([identity(5).node_id, 2, 0, 0, "new"])).data
        (blame,) = _give(world, node, later)
        assert isinstance(blame, fx.Blame) and blame.offence is Offence.RELAYED
    assert len(node.core.acl.ids()) == 2


def test_who_shows_its_own_revocation_leaves_nothing_behind(seed):
    world = World(seed, OPEN)
    node = world.add(0)
    up = LinkUp(900, identity(5).node_id, False, None, revocation(identity(5), OPEN))
    effects = node.core.handle(up, world.now)
    assert fx.Hangup(900, "revoked") in effects
    assert not node.core.anti_entropy._exchanges and len(node.core.links) == 0


def test_nothing_after_a_peers_revocation_is_listened_to(seed):
    world = _swarm(seed, 3)  # somebody is left to relay to
    node = world.nodes[0]
    link, *others = node.links
    node_id = node.core.links.get(link).node_id
    peer = next(other.identity for other in world.nodes.values() if other.identity.node_id == node_id)
    rng = np.random.default_rng(0)
    before, after = (builders.random_delta(rng, peer, round_, of=INVITED)[0] for round_ in (1, 2))
    unknown = builders.row(identity(6), of=INVITED)
    effects = _give(world, node, before.data, revocation(peer, INVITED), after.data, unknown.data)
    assert fx.Hangup(link, "revoked") in effects
    assert len(node.core.ledger) == 0
    assert others and node.core.anti_entropy.synced_once
    sent = [e.message for e in effects if isinstance(e, fx.Send) and isinstance(e.message, msg.Records)]
    assert all(data != before.data for message in sent for data, _ in message.entries), "not relayed"
    assert node.core.access.met_strangers() == []


def test_an_owner_may_ask_and_is_no_member(member):
    world, node = member
    node.core.access.vet_question(OWNER.node_id, b"", world.now)
    node.core.access.vet_question(identity(1).node_id, b"", world.now)
    for who in (identity(5), identity(6)):
        with pytest.raises(PeerError):
            node.core.access.vet_question(who.node_id, b"", world.now)
    with pytest.raises(PeerError):
        node.core.access.vet(OWNER.node_id, b"", world.now)
