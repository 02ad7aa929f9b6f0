"""Read this first: two protocol cores in memory, and one delta on its way from A to B.

A core (`protocol/replica.py`) does no I/O. It takes events, `core.handle(event, now)`, and says what is to be
done as effects. `World` is the smallest adapter there is: it carries messages between cores in virtual time
and plays the disk. The daemon does the same with sockets, SQLite and files.
"""

from __future__ import annotations

import numpy as np

from gossamer.protocol.merge.merge import merge_round
from tests.protocol import builders
from tests.protocol.wiring import Node, World


def model_of(world: World, node: Node) -> bytes:
    """Phi as this node computes it: a fold over the set of deltas that it holds, from zero."""
    layout = world.manifest.plan()
    phi = np.zeros(layout.numel, np.int32)
    rounds = {delta.round for delta in node.core.ledger}
    for round_ in rounds:
        fragment = layout.of_round(round_)
        contributions = [
            builders.contribution(delta, b"".join(node.blobs[c] for c in delta.body.chunks), layout)
            for delta in node.core.ledger.valid(round_)
        ]
        view = phi[fragment.offset : fragment.offset + fragment.numel]
        view -= merge_round(contributions, fragment, world.manifest.outer)
    return phi.tobytes()


def test_a_delta_travels_from_one_node_to_another() -> None:
    world = World(seed=1)
    a = world.add(0)
    b = world.add(1, bootstrap=[0])  # B knows A's address, dials it, and proves its key in a handshake
    world.run(5.0)
    assert len(a.links) == len(b.links) == 1

    # A's trainer has closed a window: the payload's chunks are on A's disk, and the core signs the record.
    # The record is stored before anybody hears of it (`Store`, then `Stored`): no round is signed twice.
    world.publish(a)
    world.run(0.5, until=lambda: len(list(a.core.ledger)) == 1)
    (delta,) = a.core.ledger
    assert delta.author == a.identity.node_id and delta.round == 1
    assert delta in a.disk

    # Gossip carries the record; B checks its signature and its bounds, then fetches the payload's chunks.
    world.run(2.0)
    assert [known.data for known in b.core.ledger] == [delta.data], "relayed byte for byte"
    assert b.core.holds(delta.record_id)

    # The model is a function of the set of records: the same set, the same bits.
    assert model_of(world, a) == model_of(world, b) != bytes(len(model_of(world, a)))


def test_the_order_in_which_deltas_come_does_not_matter() -> None:
    world = World(seed=2)
    a, b = world.add(0), world.add(1, bootstrap=[0])
    world.run(5.0)
    world.partition([0], [1])  # each publishes by itself
    for _ in range(3):
        world.publish(a)
        world.publish(b)
        world.run(1.0)
    assert model_of(world, a) != model_of(world, b)
    world.heal()
    world.run(40.0)  # anti-entropy finds what each lacks
    assert len(list(a.core.ledger)) == 6
    assert model_of(world, a) == model_of(world, b)
