"""The network's links as one node knows them: its own, and those that the others' rows tell of."""

from collections import Counter
from collections.abc import Iterable, Sequence

from gossamer.protocol.limits import LINK_PREFIX_BYTES
from gossamer.protocol.membership.roster import Health, Member

LIVE = (Health.ALIVE, Health.SUSPECT)


def known_links(own: Iterable[bytes], others: Sequence[Member]) -> list[tuple[int, int]]:
    """Pairs of places, ascending: we are 0, and `others` are 1, 2, ... in their order.

    `own` are the ids of the nodes that we are linked to. A row counts while its author is live, and so do the
    members that it names. It names them by the beginning of their ids; a beginning that two live members
    share names nobody.
    """
    place_of = {member.row.node_id: place for place, member in enumerate(others, 1)}
    live = [member for member in others if member.health in LIVE]
    beginnings = Counter(_beginning(member) for member in live)
    alone = [member for member in live if beginnings[_beginning(member)] == 1]
    by_beginning = {_beginning(member): place_of[member.row.node_id] for member in alone}
    found = {(0, place_of[node_id]) for node_id in own if node_id in place_of}
    for member in live:
        here = place_of[member.row.node_id]
        there = {by_beginning[start] for start in member.row.body.dialled if start in by_beginning}
        found |= {(min(here, place), max(here, place)) for place in there - {here}}
    return sorted(found)


def _beginning(member: Member) -> bytes:
    return member.row.node_id[:LINK_PREFIX_BYTES]
