"""Two lineages (a fork of history): when we give ours up for another one that members share (see `claims`).

Node ids are free in an open swarm, and one key can make two histories differ. So a difference has to last
before it counts, and longer each time that we have yielded lately. What may explain it is waited for, though
not for ever: payloads that are on their way, or members that may yet claim what we do.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from gossamer.protocol import limits
from gossamer.protocol.claims import Claim, Claims, winning_claim
from gossamer.protocol.gossip.announce import Holdings
from gossamer.protocol.history.joining import believable
from gossamer.protocol.history.peer_claims import Company, Testimony, Witness
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.membership.links import Links
from gossamer.protocol.membership.members import Roster
from gossamer.protocol.records import MemberRecord

# --- What members attest about the past, read off the roster, the ledger and the payloads that are here.


class Witnesses:
    """The members' `Testimony`."""

    def __init__(
        self, genesis: Claim, ledger: Ledger, roster: Roster, links: Links, holdings: Holdings
    ) -> None:
        """`genesis`: the only valid claim for round 0, which the manifest states."""
        self._genesis = genesis
        self._ledger = ledger
        self._roster = roster
        self._links = links
        self._holdings = holdings
        self._company = Company(roster, ledger)
        self._unusable: dict[bytes, None] = {}
        """Roots of unusable snapshots, oldest first: claims of them do not count."""

    def unusable(self, root: bytes) -> None:
        """A claimed snapshot turned out to be none of this model: no claim of it counts any more."""
        self._unusable[root] = None
        if len(self._unusable) > limits.UNUSABLE_MAX:
            del self._unusable[next(iter(self._unusable))]

    def witnesses(self) -> list[Witness]:
        given_ids, authors = self._links.given_ids(), self._ledger.last_rounds
        return [
            Witness(
                self._claims_of(row),
                row.node_id,
                row.node_id in given_ids,
                member.told_at,
                row.body.round if row.node_id in authors else 0,
                row.body.trains,
            )
            for member in self._roster.live()
            for row in (member.record,)
        ]

    def contributors(self) -> list[Claims]:
        """The claims of each author of a delta whose payload is here.

        This includes members that are absent just now: they have not spoken against us, and may have spoken
        for us.
        """
        authors = {delta.author for delta in self._ledger if self._holdings.holds(delta.record_id)}
        rows = [member.record for member in self._roster.members()]
        return [self._claims_of(row) for row in rows if row.node_id in authors]

    def look(self, now: float) -> None:
        """Note which members are present. Call this every few seconds."""
        self._company.look(now)

    def authors(self) -> int:
        return len(self._company)

    def share_lacking(self, round_: int, now: float) -> float:
        return self._holdings.share_lacking(round_, now)

    def _claims_of(self, row: MemberRecord) -> Claims:
        """A member's claims, without those that cannot be true."""
        genesis, unusable = self._genesis, self._unusable
        return tuple(
            [
                claim
                for claim in row.body.claims
                if claim.root not in unusable and (claim.round > 0 or claim == genesis)
            ]
        )


SILENCE_S = 300.0
"""Members that claim other rounds than ours are waited for this long before a claim wins without them: they
may still be writing the snapshot of our round, or have no room to write any more."""

WORD_S = 7.5
"""How long a member's word is fresh; it is renewed every 4.5 s. What we published before the word came has
reached somebody by then."""

DIFFERENCE_KEPT_S = 60.0
"""A difference is remembered for this long while nobody claims the round that we do."""

MINORITY = 1 / 3
"""The share of the authors that may be liars."""


class Defeat(NamedTuple):
    """Our history is to be given up."""

    winner: Claim
    """The snapshot to start again from."""
    text: str
    """What to tell the user."""


class _Condition:
    """A condition that lasts, though it shows only now and then."""

    def __init__(self) -> None:
        self.since: float | None = None
        self._shown_at = 0.0

    def shows(self, now: float) -> float:
        """The condition shows now; returns since when it has lasted."""
        if self.since is None or now - self._shown_at > DIFFERENCE_KEPT_S:
            self.since = now
        self._shown_at = now
        return self.since

    def ends(self) -> None:
        self.since = None


class Lineages:
    """Compares our history with the members' histories, and remembers how often we have yielded."""

    def __init__(self, own_last: Callable[[], int]) -> None:
        """`own_last`: the last round that we have signed, 0 if none."""
        self._own_last = own_last
        self._difference = _Condition()
        """Lasts while a claim for the round that we claim wins against ours."""
        self._unanswered = _Condition()
        """Lasts while a claim would win but for the members that claim other rounds."""
        self._behind_since: float | None = None
        """Since when most members have been at rounds that we have closed."""
        self._lacked_much_at = 0.0
        """When payloads of more than a minority were last missing while claims differed."""
        self._yields: deque[float] = deque(maxlen=limits.LINEAGE_DOUBLINGS_MAX)
        """When we gave up our history for another one, lately."""

    def adopted(self) -> None:
        """Our history is another one now."""
        self._difference.ends()
        self._unanswered.ends()
        self._behind_since = None

    def unusable(self) -> None:
        """Nobody can adopt the winner: any other difference has to last as long again."""
        self._difference.ends()

    def outweighed(
        self,
        own: Claim,
        claimed: Mapping[int, Claim],
        members: Sequence[Witness],
        testimony: Testimony,
        now: float,
    ) -> Defeat | None:
        """Whether another claim for a round that we have claimed outweighs ours, and stays.

        `own`: our newest claim. `claimed`: what we have claimed lately and stand by, by round; where rounds
        are fast, members seldom claim our newest. A member that claims other rounds only may yet claim what
        we do, unless it contradicts us about one before. Node ids are free in an open swarm, so members that
        never contributed have no voice against our history. Nor does a claim against our history count once
        all members that made it are out of sight: what we published since, and they do not have, may be the
        difference.
        """
        others = [member.claims for member in members]
        if self._difference.since is None and not _disputed(claimed, others):
            # As nearly always: this costs little.
            if self._unanswered.since is not None and any(own in claims for claims in others):
                self._unanswered.ends()
            return None
        own, claims = _vote(own, claimed, testimony.contributors())
        fresh = {member.claims for member in members if now - member.told_at <= WORD_S}
        winner = winning_claim(own, claims) or self._wins_unanswered(own, claims, fresh, now)
        if winner is None or not any(winner in of_one for of_one in fresh):
            # Where rounds are fast, members seldom claim the very round that we do: silence proves nothing.
            if _of_round(own.round, claims):
                self._difference.ends()
            return None
        since = self._difference.shows(now)
        if self._may_be_explained(testimony.share_lacking(own.round, now), since, now):
            return None
        self._yields.append(now)
        return Defeat(winner, _outweighed(own, winner))

    def left_behind(
        self, floor: int, members: Sequence[Witness], testimony: Testimony, now: float
    ) -> Defeat | None:
        """Whether the other lineage, that of most members, is at rounds up to `floor`, which we have closed.

        A fast node that was cut off goes by its own clock alone, and may be hours ahead of the others when it
        hears of them again. Each side then refuses the other's records, and claims never name the same round.
        A member that has published nothing since it came back does not count as behind: it may still find out
        that we went on. Who does not train counts on neither side, since it never publishes; nor do we, if we
        have not. Absent members count against it: those present may be mostly liars for a moment.
        """
        said = [one for one in members if one.trains and one.claims and now - one.told_at <= WORD_S]
        behind = [
            member
            for member in said
            if 0 < member.round <= floor and all(claim.round < floor for claim in member.claims)
        ]
        ours = int(self._own_last() > 0)
        if not behind or 2 * len(behind) <= ours + max(len(said), testimony.authors()):
            self._behind_since = None
            return None
        if self._behind_since is None:
            self._behind_since = now
        winner = believable(behind)
        if winner is None or now - self._behind_since < self._patience(now):
            return None
        self._yields.append(now)
        at = max(member.round for member in behind)
        return Defeat(winner, _left_behind(floor, at, winner, self._own_last()))

    def _patience(self, now: float) -> float:
        """How long a difference has to last before we give up our history: longer each time."""
        while self._yields and now - self._yields[0] > limits.LINEAGE_MEMORY_S:
            self._yields.popleft()
        return limits.LINEAGE_PATIENCE_S * 2.0 ** len(self._yields)

    def _wins_unanswered(
        self, own: Claim, claims: Sequence[Claims], fresh: Collection[Claims], now: float
    ) -> Claim | None:
        """The claim that wins without the members that claim other rounds, once we have waited for those.

        It does not win if more members that are there (`fresh`) claim other rounds than make it: a few liars
        can wait for a round that nobody else claims any more.
        """
        of_round = _of_round(own.round, claims)
        winner = winning_claim(own, of_round)
        silent = sum(of_one in fresh and not _claims(of_one, own.round) for of_one in claims if of_one)
        if winner is None or sum(winner in of_one for of_one in of_round) < silent:
            if of_round:
                self._unanswered.ends()
            return None
        return winner if now - self._unanswered.shows(now) >= SILENCE_S else None

    def _may_be_explained(self, share_lacking: float, since: float, now: float) -> bool:
        """Whether records or payloads on their way may explain a difference that has shown `since` then.

        Those that have just come may explain it, too: our claim, and the others', are older.
        """
        patience = self._patience(now)
        if share_lacking > MINORITY:
            self._lacked_much_at = now
        if share_lacking:
            patience = max(patience, limits.LINEAGE_MINORITY_PATIENCE_S)
        return now - max(since, self._lacked_much_at) < patience


def _of_round(round_: int, claims: Sequence[Claims]) -> list[Claims]:
    """The claims of each member that claims anything for a round."""
    return [of_one for of_one in claims if _claims(of_one, round_)]


def _claims(of_one: Claims, round_: int) -> bool:
    return any(claim.round == round_ for claim in of_one)


def _vote(
    newest: Claim, claimed: Mapping[int, Claim], heard: Sequence[Claims]
) -> tuple[Claim, Sequence[Claims]]:
    """One of our claims, and what the members say about it: the newest that loses, else the newest that is
    disputed, else our newest."""
    votes = [
        (ours, [_voice(ours, of_one, claimed) for of_one in heard])
        for ours in _disputed(claimed, heard) or [newest]
    ]
    return next((vote for vote in votes if winning_claim(*vote)), votes[0])


def _voice(ours: Claim, of_one: Claims, claimed: Mapping[int, Claim]) -> Claims:
    """What a member says about `ours`, one of the claims in `claimed`; nothing if it will never make it."""
    if _shared(of_one, claimed) >= ours.round:
        return (ours,)  # what it shares with us holds all that came before
    against = _against(of_one, claimed)
    is_settled = any(claim.round < ours.round for claim in against) and not _claims(of_one, ours.round)
    return () if is_settled else of_one


def _disputed(claimed: Mapping[int, Claim], others: Sequence[Claims]) -> list[Claim]:
    """What we have claimed and members contradict, newest first."""
    found = {claimed[claim.round] for of_one in others for claim in _against(of_one, claimed)}
    return sorted(found, reverse=True)


def _against(of_one: Claims, claimed: Mapping[int, Claim]) -> list[Claim]:
    """A member's claims that contradict ours. One before a claim that it shares with us does not: it has not
    been written again since a late record came, and never will be."""
    shared = _shared(of_one, claimed)
    return [claim for claim in of_one if claim.round > shared and claimed.get(claim.round, claim) != claim]


def _shared(of_one: Claims, claimed: Mapping[int, Claim]) -> int:
    """The newest round for which a member claims what we do; -1 if there is none."""
    return max((claim.round for claim in of_one if claimed.get(claim.round) == claim), default=-1)


def _outweighed(own: Claim, winner: Claim) -> str:
    return (
        f"TWO LINEAGES: the swarm's history up to round {winner.round} has deltas of {winner.tokens}"
        f" tokens, ours {own.tokens}; starting again from the swarm's snapshot, keeping the open window"
    )


def _left_behind(floor: int, at: int, winner: Claim, last: int) -> str:
    text = (
        f"TWO LINEAGES: cut off from most members, we closed rounds up to {floor}, while they are at"
        f" round {at}; starting again from their snapshot of round {winner.round}: what we published"
        " meanwhile is dropped"
    )
    if last > at:
        text += f", and we publish again in {last - at} rounds, once the others are past those that we signed"
    return text
