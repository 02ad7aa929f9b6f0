"""Two lineages: when our history is given up for another one that members share (see `claims`).

Names are free in an open swarm, and one key can make two histories differ. So a difference has to last before
it counts, longer each time that we have yielded lately; and what may explain it, payloads that are on their
way, or members that may yet claim what we do, is waited for, though not for ever.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from gossamer.protocol import limits
from gossamer.protocol.claims import Claim, Claims, contest
from gossamer.protocol.history.joining import believable
from gossamer.protocol.history.testimony import Testimony, Witness

SILENCE_S = 300.0
"""So long members that claim other rounds than ours are waited for before a claim wins without them: they may
be writing its snapshot, or may have no room to write any more."""

WORD_S = 7.5
"""A member's word is renewed each 4.5 s. What we published before it came has reached somebody by then."""

DIFFERENCE_KEPT_S = 60.0
"""So long a difference is remembered while nobody claims the round that we do."""

MINORITY = 1 / 3
"""So large a share of the authors may be liars."""


class Defeat(NamedTuple):
    """Our history is to be given up."""

    winner: Claim
    """The snapshot to start again from."""
    text: str
    """What to tell the user."""


class _Spell:
    """Something that lasts, though it shows only now and then."""

    def __init__(self) -> None:
        self.since: float | None = None
        self._shown_at = 0.0

    def shows(self, now: float) -> float:
        """It shows now; returns since when it has lasted."""
        if self.since is None or now - self._shown_at > DIFFERENCE_KEPT_S:
            self.since = now
        self._shown_at = now
        return self.since

    def ends(self) -> None:
        self.since = None


class Lineages:
    """Compares our history with the members', and knows how often we have yielded."""

    def __init__(self, own_last: Callable[[], int]) -> None:
        """`own_last`: the last round that we have signed, 0 if none."""
        self._own_last = own_last
        self._difference = _Spell()
        """A claim for the round that we claim wins against ours."""
        self._unanswered = _Spell()
        """A claim would win but for those who claim other rounds."""
        self._behind_since: float | None = None
        """Since when most members are at rounds that we have closed."""
        self._lacked_much_at = 0.0
        """When payloads of more than a minority were last missing while claims differed."""
        self._yields: deque[float] = deque(maxlen=limits.LINEAGE_DOUBLINGS_MAX)
        """When we gave our history up for another, lately."""

    def adopted(self) -> None:
        """Our history is another one now."""
        self._difference.ends()
        self._unanswered.ends()
        self._behind_since = None

    def unusable(self) -> None:
        """The winner cannot be adopted by anybody: what differs besides has to last as long."""
        self._difference.ends()

    def outweighed(
        self,
        own: Claim,
        claimed: Mapping[int, Claim],
        members: Sequence[Witness],
        testimony: Testimony,
        now: float,
    ) -> Defeat | None:
        """Whether another claim for the round that we claim outweighs ours, `own`, and stays.

        `claimed`: what we have claimed lately, by round. Who claims other rounds only may yet claim what we
        do, unless it contradicts us about one of these.
        Names are free in an open swarm, so those who never contributed have no voice against our history.
        Nor does a word against it count that was given before we lost sight of all who gave it: what we
        published then, and they do not have, may be the difference.
        """
        others = [member.claims for member in members]
        if self._difference.since is None and not _is_disputed(own, others):  # as nearly always: costs little
            if self._unanswered.since is not None and any(own in claims for claims in others):
                self._unanswered.ends()
            return None
        claims = [
            of_one for of_one in testimony.contributors() if not _contradicts(of_one, own.round, claimed)
        ]
        fresh = {member.claims for member in members if now - member.told <= WORD_S}
        winner = contest(own, claims) or self._wins_unanswered(own, claims, fresh, now)
        if winner is None or not any(winner in of_one for of_one in fresh):
            # With fast rounds members seldom claim the very round that we do: silence proves nothing.
            if _of_round(own.round, claims):
                self._difference.ends()
            return None
        since = self._difference.shows(now)
        if self._may_be_explained(testimony.share_lacking(own.round, now), since, now):
            return None
        self._yields.append(now)
        return Defeat(winner, _outweighed(own, winner))

    def left_behind(
        self, floor: int, members: Sequence[Witness], authors: Callable[[], int], now: float
    ) -> Defeat | None:
        """Whether the other lineage, that of most members, is at rounds up to `floor`, which we have closed.

        A fast node that was cut off goes by its own clock alone, and may be hours ahead of the others when
        it hears of them again. Each refuses the other's records then, and claims never name the same round.
        Who has published nothing since it came back is not among them: it may find out yet that we went on.
        Nor is who is not there: a few liars might be most of those who are, for a moment.
        """
        said = [member for member in members if member.claims and now - member.told <= WORD_S]
        behind = [
            member
            for member in said
            if 0 < member.round <= floor and all(claim.round < floor for claim in member.claims)
        ]
        if not behind or 2 * len(behind) <= 1 + max(len(said), authors()):
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
        """How long a difference has to last before our history is given up: longer each time."""
        while self._yields and now - self._yields[0] > limits.LINEAGE_MEMORY_S:
            self._yields.popleft()
        return limits.LINEAGE_PATIENCE_S * 2.0 ** len(self._yields)

    def _wins_unanswered(
        self, own: Claim, claims: Sequence[Claims], fresh: Collection[Claims], now: float
    ) -> Claim | None:
        """The claim that wins without those who claim other rounds, once they have been waited for.

        Not against more of those who are there, `fresh`, than make it: a few liars can wait for a round that
        nobody else claims any more.
        """
        of_round = _of_round(own.round, claims)
        winner = contest(own, of_round)
        silent = sum(of_one in fresh and not _claims(of_one, own.round) for of_one in claims if of_one)
        if winner is None or sum(winner in of_one for of_one in of_round) < silent:
            if of_round:
                self._unanswered.ends()
            return None
        return winner if now - self._unanswered.shows(now) >= SILENCE_S else None

    def _may_be_explained(self, share_lacking: float, since: float, now: float) -> bool:
        """Whether a difference that shows `since` then may come of records or payloads on their way.

        Or of those that have just come: our claim, and the others', are from before that.
        """
        patience = self._patience(now)
        if share_lacking > MINORITY:
            self._lacked_much_at = now
        if share_lacking:
            patience = max(patience, limits.LINEAGE_MINORITY_PATIENCE_S)
        return now - max(since, self._lacked_much_at) < patience


def _of_round(round_: int, claims: Sequence[Claims]) -> list[Claims]:
    """The claims of the members that claim anything for a round."""
    return [of_one for of_one in claims if _claims(of_one, round_)]


def _claims(of_one: Claims, round_: int) -> bool:
    return any(claim.round == round_ for claim in of_one)


def _contradicts(of_one: Claims, round_: int, claimed: Mapping[int, Claim]) -> bool:
    """Whether a member that claims other rounds only will not come to claim what we do for this one."""
    return not _claims(of_one, round_) and any(claimed.get(claim.round, claim) != claim for claim in of_one)


def _is_disputed(own: Claim, others: Sequence[Claims]) -> bool:
    """Whether anybody claims something else than we do for the round that we claim."""
    return any(claim.round == own.round and claim != own for claims in others for claim in claims)


def _outweighed(own: Claim, winner: Claim) -> str:
    return (
        f"TWO LINEAGES: the swarm's history up to round {winner.round} has deltas of {winner.tokens}"
        f" tokens, ours {own.tokens}; starting again from the swarm's snapshot, keeping the open window"
    )


def _left_behind(floor: int, at: int, winner: Claim, last: int) -> str:
    text = (
        f"TWO LINEAGES: cut off from most members we closed rounds up to {floor}, and they are at"
        f" round {at}; starting again from their snapshot of round {winner.round}: what we published"
        " meanwhile is given up"
    )
    if last > at:
        text += f", and they have {last - at} rounds to go, those that we signed, until we publish again"
    return text
