"""The swarm's round clock as one node reads it, and the rounds that the node takes for possible by now."""

from collections.abc import Iterator
from math import inf

from gossamer.protocol import limits
from gossamer.protocol.access.acl import Role
from gossamer.protocol.context import Context
from gossamer.protocol.gossip.announce import Author
from gossamer.protocol.membership.members import Activity
from gossamer.protocol.pace import MIN_STEPS, is_plausible, round_clock, stretch
from gossamer.protocol.sampling import EVERY_ROUND
from gossamer.protocol.unix_time import UnixTime


class SwarmClock:
    """Reads the round clock off the records and deltas of the live members."""

    def __init__(self, context: Context, author: Author, unix_time: UnixTime) -> None:
        """`author`: the author of our own deltas."""
        self._manifest = context.manifest
        self._acl = context.acl
        self._roster = context.roster
        self._ledger = context.ledger
        self._trains = context.info.trains
        """Whether we count in the clock."""
        self._author = author
        self.turn = EVERY_ROUND
        """How often members contribute now, see `sampling.is_drawn` ..."""
        self.turn_since = 0
        """... which holds for rounds after this one."""
        self.published_round = 0
        """The last round that we have published since we started or came back; 0 before the first."""
        self._own = Activity(-inf)
        self._inner_steps = 0
        self._listens_until = -inf
        self._unix_time = unix_time
        history = context.manifest.history
        if context.manifest.pace.is_set_by_swarm:
            history = history.stretched(stretch(MIN_STEPS))
        apart = history.retain or limits.APART_MAX
        self._ahead = limits.ROUND_SLACK + max(apart, history.seal_after + history.snapshot_every)
        self._reading = 0
        self._read_as: tuple[int, int, int] | None = None
        """What we had published, and what was closed, when the clock was read."""
        self._reads_until = -inf
        self.is_contradicted = False
        """Whether, when the clock was last read, most of the others that have published were at rounds that
        the swarm cannot have reached yet by our time. Either our time is wrong, or that of the swarm's
        founder was. We refuse what they publish."""

    def begin(self, now: float) -> None:
        """We have started: our own trainer gets time for its first step."""
        self._own = Activity(now)

    def allows(self, round_: int, now: float) -> bool:
        """Whether the swarm is old enough for this round."""
        return is_plausible(round_, self._manifest, self._unix_time.latest(now))

    def is_near(self, round_: int, now: float) -> bool:
        """Whether a round is no further ahead of the swarm than one side of a partition can have got.

        Otherwise a key could sign for every round that the swarm is old enough for, and have us keep them
        all. A record refused for this is offered again by its holders, and taken once the swarm is near.
        """
        base = round_ - self._ahead
        return base <= self._ledger.floor or base <= self.read(now)  # no clock is below the floor

    def begin_at(self, round_: int, now: float) -> int:
        """Our history is another one, which begins at the snapshot of a round.

        Returns the newest round that all others take to be near, even where they read an older clock by as
        much as ROUND_SLACK.
        """
        known, _ = self._latest_of_others(now)
        return max(round_, round_clock(known)) + self._ahead - limits.ROUND_SLACK

    def read(self, now: float) -> int:
        """The round that the swarm is at; in a large swarm, as it was a moment ago.

        It is asked for with every event, and finding it means looking at every member.
        """
        members = len(self._roster.live())
        if members <= limits.CLOCK_CACHED_ABOVE_MEMBERS:
            return self._find(now)
        read_as = self._author.last_round, self.published_round, self._ledger.floor
        if read_as == self._read_as and now < self._reads_until:
            return self._reading
        self._reading, self._read_as = self._find(now), read_as
        self._reads_until = now + members * limits.CLOCK_KEPT_PER_MEMBER_S
        return self._reading

    def _find(self, now: float) -> int:
        """The round that the members are at.

        A member *has a say* if it trains now, and has published since it started, woke up or began to train
        again. Members without a say still count as members: when two of three nodes are away or hang, the one
        that goes on neither waits for them nor has to be caught up with round by round.

        * The clock is never behind the one taken of everything that members are known to have published.
          Otherwise the few with a say could take the swarm back to where they are, and members ahead of them,
          which then publish nothing, would never have a say again.
        * Rounds for which the swarm is too young are left out: a node that followed them would sign what all
          others refuse.
        * Where nobody has a say, we have just come back, and go on where the members that are gone left off.
        """
        own = self._author.last_round
        known, said = self._latest_of_others(now)
        members, (newest, _) = len(known) + self._trains, max(known, default=(0, b""))
        is_possible = self.allows(newest, now)
        impossible = 0 if is_possible else sum(not self.allows(round_, now) for round_, _ in known)
        self.is_contradicted = 2 * impossible > sum(round_ > 0 for round_, _ in known)
        if self.published_round and not self._own.is_idle(now):
            said.append((own, self._author.node_id))
        if self._trains:
            known.append((own, self._author.node_id))
        if said and not (is_possible and (own <= newest or self.allows(own, now))):
            said = [latest for latest in said if self.allows(latest[0], now)]
            known = [latest for latest in known if self.allows(latest[0], now)]
        if not said:
            return max(own, self._ledger.reached(but=self._author.node_id))
        turns = members, self.turn, self.turn_since
        clock = max(self._ledger.floor, round_clock(said, *turns))
        return clock if len(said) == len(known) else max(clock, round_clock(known, *turns))

    def somebody_trains(self, now: float) -> bool:
        """Whether a live member, or we, made progress while we looked, and not long ago."""
        return any(one.stride_s and not one.is_idle(now) for one in self._activities())

    def rests(self, now: float) -> bool:
        """Whether nobody trains any more, so that the clock will stay where it is."""
        return not self.listens(now) and all(one.is_idle(now) for one in self._activities())

    def progress(self, inner_steps: int, now: float) -> None:
        """Our own trainer has reported how far it is."""
        if self._own.is_idle(now) and self.read(now) > self._author.last_round + 1:
            self.published_round = 0  # the swarm has gone on without us
        self._inner_steps = inner_steps
        self._own.note(inner_steps, self._author.last_round, now)

    def published(self, round_: int, now: float) -> None:
        """A delta of ours is out. One that was on its way when we fell asleep has the round of that time."""
        if not self.listens(now):
            self.published_round = round_
        self._own.note(self._inner_steps, round_, now)

    def woke(self, now: float) -> None:
        """This machine slept: we do not know what the others have done meanwhile."""
        self._listens_until = now + limits.WAKE_PATIENCE_S
        self.published_round = 0
        for activity in self._activities():
            activity.moved = -inf

    def linked(self, now: float) -> None:
        """A link came up: there is a peer to listen to."""
        self._listens_until = min(self._listens_until, now + limits.RESUME_PATIENCE_S)

    def listens(self, now: float) -> bool:
        """Whether we slept until just now, and have still to hear where the swarm is.

        The first peer that we hear may have slept too, and the first rows may date from before.
        """
        return now < self._listens_until

    def _activities(self) -> Iterator[Activity]:
        yield self._own
        for member in self._roster.live():
            yield member.activity

    def _latest_of_others(self, now: float) -> tuple[list[tuple[int, bytes]], list[tuple[int, bytes]]]:
        """The latest rounds of all live members that may train, and of those among them that have a say, each
        with the member's id."""
        last_rounds, role_of, train = self._ledger.last_rounds, self._acl.role_of, Role.TRAIN
        known, said = [], []
        for member in self._roster.live():
            row, node_id = member.record.body, member.record.node_id
            if not row.trains or role_of(node_id) is not train:
                continue
            told, signed = row.round, last_rounds.get(node_id, 0)
            round_ = told if told > signed else signed  # faster than `max`, and there may be many members
            known.append((round_, node_id))
            if told and not member.activity.is_idle(now):
                said.append((round_, node_id))
        return known, said
