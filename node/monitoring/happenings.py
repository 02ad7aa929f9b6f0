"""Logs what changes in the swarm: who comes and goes, and whether the replicas agree.

That a member does not answer, or is down, is logged by the code that finds out (see `protocol.membership`).
"""

import logging
from collections.abc import Iterable, Sequence, Set

from gossamer.node.monitoring.known_links import LIVE
from gossamer.node.monitoring.replicas import Likeness, compare
from gossamer.protocol.claims import Claim
from gossamer.protocol.membership.roster import Health, Member, listed

log = logging.getLogger("gossamer.node")


class Happenings:
    """Compares each look at the swarm with the one before."""

    def __init__(self) -> None:
        self._seen: dict[bytes, tuple[Health, int]] = {}
        """Each member's health at the last look, and how often it had been down by then."""
        self._told_round = 0
        self._differing: Set[bytes] = set()

    def look(self, members: Sequence[Member], claims: tuple[Claim, ...]) -> None:
        """Log what has changed since the last look; `claims` are ours."""
        self._say_who_came_and_went(members)
        self._say_who_differs(members, claims)

    def _say_who_came_and_went(self, members: Sequence[Member]) -> None:
        before = self._seen
        self._seen = {member.row.node_id: (member.health, member.downs) for member in members}
        known = [member for member in members if member.row.node_id in before]
        _say("heard of %s", [m for m in members if m.row.node_id not in before and m.health in LIVE])
        _say("back again: %s", [m for m in known if _is_back(m, *before[m.row.node_id])])
        _say("left: %s", [m for m in known if m.health is Health.LEFT is not before[m.row.node_id][0]])

    def _say_who_differs(self, members: Sequence[Member], claims: tuple[Claim, ...]) -> None:
        """Log members whose model differs from ours and, once for each of our snapshots, that all live
        members have the same."""
        live = [member for member in members if member.health in LIVE]
        found = {member.row.node_id: compare(claims, member.row.body.claims) for member in live}
        differing = {
            id_: pair.round for id_, pair in found.items() if pair and pair.likeness is Likeness.OTHER
        }
        new = [member for member in live if member.row.node_id in differing.keys() - self._differing]
        for round_ in sorted({differing[member.row.node_id] for member in new}):
            at_once = [member for member in new if differing[member.row.node_id] == round_]
            _say(f"the model of %s differs from ours at round {round_}", at_once, logging.ERROR)
        self._differing = differing.keys()
        newest = claims[0].round if claims else 0
        is_shared = bool(found) and all(pair == (newest, Likeness.SAME) for pair in found.values())
        if is_shared and newest > self._told_round:
            self._told_round = newest
            log.info("round %d is sealed: all %d replicas are identical", newest, len(found) + 1)


def _is_back(member: Member, health: Health, downs: int) -> bool:
    """Whether a member is alive that was gone at the last look, or has been down since.

    A member that has lost its network dials again just when it is given up, so it is often down only for a
    moment.
    """
    return member.health is Health.ALIVE and (health not in LIVE or member.downs > downs)


def _say(sentence: str, members: Iterable[Member], level: int = logging.INFO) -> None:
    """Log one line for all of them, since anybody may be hundreds of members; nothing if there are none."""
    if names := listed(member.label for member in members):
        log.log(level, sentence, names)
