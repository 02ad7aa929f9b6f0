"""What a node missed while it was away, stopped or asleep: whether the swarm has outlived what it holds.

Nobody has the rounds any more that were closed meanwhile. Without them, what came after makes another model
than the swarm's, and the nodes that came back together could be most of the swarm. So a node that finds this
out starts over from the snapshot of those that went on, or from its own if those are gone.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from math import inf

from gossamer.protocol import limits
from gossamer.protocol.claims import Claim, closable_round
from gossamer.protocol.history.testimony import Witness
from gossamer.protocol.manifest import HistorySection

RETURN_S = 30.0
"""For this long a node looks whether the swarm has outlived what it holds: from when it has heard of a member
after its return, or goes on by itself. After a power cut machines may start minutes before their network.
A node that knows of nobody waits for nobody."""

ROUNDS_UNDER_WAY = 2
"""A member that is one round behind skips at most the next one; it has published for older rounds."""


def known_up_to(sealed: int, rounds: Iterable[int]) -> int:
    """The newest of `rounds`, those with records, up to which none was missed since the newest `sealed` one.

    Rounds beyond a gap were heard of after a return: a node that stops before it fills the gap keeps it. Nor
    do the last rounds count, which others may have published for after the node went.
    """
    newest = sealed
    for round_ in sorted(rounds):
        if round_ > newest + 1 + ROUNDS_UNDER_WAY:
            break
        newest = max(newest, round_)
    return max(sealed, newest - ROUNDS_UNDER_WAY)


class Absence:
    """Our last absence, until we know what we have missed, and that is made good."""

    def __init__(
        self,
        section: HistorySection,
        tells_of: Callable[[int, Collection[bytes]], bool],
        *,
        is_first: bool,
    ) -> None:
        """`tells_of`, `is_first`: see `Sealing`."""
        self._section = section
        self._tells_of = tells_of
        self._is_first = is_first
        self.extent = 0
        """The newest round that we knew of when we went away, moved on past those that we know since."""
        self._company: frozenset[bytes] | None = None
        """The members that were there then; None if that is not known."""
        self.looks_until = 0.0
        """Until when we look for what we have missed: infinite before that begins, 0 once it is over."""
        self._outlived_since: float | None = None
        """Since when the members that we hear say that we were outlived."""
        self.given_up: Claim | None = None
        """The newest snapshot that we held, while we start over from the swarm's."""
        self._ahead_at = 0.0
        """When, since we gave that up, a member that went on was last there."""

    # -- what happens

    def came_back(self, extent: int, company: frozenset[bytes] | None, has_history: bool) -> None:
        """We are back, and knew of rounds up to `extent` when we went. `company`: the members there then.

        If we have heard of nobody since our last return, for want of a network, that was no return.
        """
        if self.looks_until == inf or self.given_up is not None:
            return
        self.extent = extent
        self._company = company
        self._outlived_since = None
        self.looks_until = inf if has_history else 0.0

    def give_up(self, claim: Claim, now: float) -> None:
        """We start over. `claim`: the newest snapshot that we held."""
        self.given_up, self._ahead_at = claim, now
        self.looks_until = 0.0

    def over(self) -> None:
        """Our history begins at a snapshot that we have adopted."""
        self.given_up, self.looks_until, self._outlived_since = None, 0.0, None

    # -- what is heard of the others

    @property
    def may_be_outlived(self) -> bool:
        """Whether the members that we hear say that the swarm went on without us; not settled yet."""
        return self._outlived_since is not None

    def is_outlived(self, clock: int, members: Sequence[Witness], now: float) -> bool:
        """Whether the members that we left have closed rounds, while we were away, that we never heard of."""
        if now >= self.looks_until:
            self.looks_until, self._outlived_since = 0.0, None
            return False
        if members or self._is_first or clock > self.extent + ROUNDS_UNDER_WAY:
            self.looks_until = min(self.looks_until, now + RETURN_S)
        self._extend(members)
        if not self._is_ahead(clock, members):
            self._outlived_since = None
            return False
        if self._outlived_since is None:
            self._outlived_since = now
        return now - self._outlived_since >= limits.ROSTER_PATIENCE_S  # the first to be heard may be a liar

    def who_went_on(self, members: Sequence[Witness]) -> list[Witness]:
        """The members that claim something newer than all that we knew."""
        return [member for member in members if self._went_on(member)]

    def are_gone(self, ahead: Sequence[Witness], now: float) -> bool:
        """Whether no member that went on has been there for long. `ahead`: those that are there now."""
        if ahead:
            self._ahead_at = now
        return now - self._ahead_at > limits.OUTLIVED_PATIENCE_S

    def _went_on(self, member: Witness) -> bool:
        return bool(member.claims) and member.claims[0].round > self.extent

    def _extend(self, members: Sequence[Witness]) -> None:
        """Move `extent` on while our ledger tells of further rounds: we take part, or were not gone for long.

        What other members that were away publish now, late, tells nothing of those rounds.
        """
        away = {member.node_id for member in members}
        away.difference_update(member.node_id for member in self.who_went_on(members))
        while all(self._tells_of(self.extent + 1 + after, away) for after in (0, ROUNDS_UNDER_WAY)):
            self.extent += 1

    def _is_ahead(self, clock: int, members: Sequence[Witness]) -> bool:
        """Whether a member that we left went on, to where all that we know of is closed.

        A member that was not there then had been cut off from us, or we from it: then neither history is the
        one that went on. Who does not train moves no clock. So where all that trained are gone, or come back
        as we do, the word of those at our join addresses tells how far the swarm went.
        """
        ahead = self.who_went_on(members)
        known = any(self._company is None or member.node_id in self._company for member in ahead)
        reached = clock
        if not any(member.round and not self._went_on(member) for member in members):
            reached = max([clock, *(member.claims[0].round for member in ahead if member.is_named)])
        return known and closable_round(reached, reached, self._section) > self.extent
