"""The state machine of `history`: when to seal, what to forget, and from which snapshot to start.

It sees its own claims and those of the live members, and asks its adapter for work: `Seal`, `Close`,
`Adopt`. A node that has not joined yet has no claims; its first one is what it adopted.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from math import inf

from gossamer.protocol import limits
from gossamer.protocol.effects import Adopt, Close, Effect, Notice, Seal
from gossamer.protocol.history import (
    Claim,
    Claims,
    agreed,
    closable_round,
    contest,
    genesis_claim,
    roundest,
    sealed_round,
)
from gossamer.protocol.joining import Joining, Witness, believable
from gossamer.protocol.manifest import Manifest

LOOK_INTERVAL_S = 2.5
"""At every second of the turns that a node takes (see `replica`)."""

JOINING_LOOK_S = 0.05
"""Who looks for a snapshot to start from is in more of a hurry."""

CLAIMED_MAX = 32
"""Where rounds are fast the members' newest snapshots are seldom of the same round at the same time."""

RETURN_S = 30.0
"""So long after its start a node looks whether the swarm has outlived what its folder holds."""

RETURN_LOOK_S = 0.25

ROUNDS_UNDER_WAY = 2
"""A member that is behind by one round skips the next at most; what is older has been published for."""

SILENCE_S = 300.0
"""So long members that claim other rounds than ours are waited for before a claim wins without them: they may
be writing its snapshot, or may have no room to write any more."""

WORD_S = 7.5
"""A member's word is renewed each 4.5 s. What we published before it came has reached somebody by then."""

DIFFERENCE_KEPT_S = 60.0
"""So long a difference is remembered while nobody claims the round that we do."""

MINORITY = 1 / 3
"""So large a share of the authors may be liars."""

GONE_AFTER_S = 10.0
"""A snapshot that nobody has claimed for this long is not worth waiting for."""


class Sealing:
    """Decides about the sealed past of one node."""

    def __init__(
        self,
        manifest: Manifest,
        is_first: bool,
        trusted: Collection[bytes] = (),
        tells_of: Callable[[int, Collection[bytes]], bool] = lambda round_, but: False,
        own_last: Callable[[], int] = lambda: 0,
    ) -> None:
        """`is_first`: there is nobody to join, so history begins here, with genesis. `trusted`: see
        `Joining`. `tells_of`: whether our ledger has a record of a round by anybody but ourselves and
        some others. `own_last`: the last round that we have signed, 0 if none."""
        self._section = manifest.history
        self.genesis = genesis_claim(manifest.genesis.root)
        self._is_first = is_first
        self._trusted = trusted
        self._tells_of = tells_of
        self._own_last = own_last
        self._joining = Joining(trusted)
        self.claims: Claims = ()
        """The snapshots that we hold, newest first; empty until we have joined."""
        self._claimed: dict[int, Claim] = {}
        """What we claimed lately, by round, and would claim again: others may still be there."""
        self.adopting: Claim | None = None
        self.floor = 0
        self._asked_to_seal = 0
        self._clocks: deque[tuple[float, int]] = deque()
        self._claimed_at = 0.0
        self._differs_since: float | None = None
        self._differed_at = 0.0
        self._behind_since: float | None = None
        """Since when most members are at rounds that we have closed."""
        self._yields: deque[float] = deque(maxlen=limits.LINEAGE_DOUBLINGS_MAX)
        """When we gave our history up for another, lately."""
        self._unanswered_since: float | None = None
        """Since when a claim would win but for those who claim other rounds."""
        self._unanswered_at = 0.0
        self._lacked_much_at = 0.0
        """When payloads of more than a minority were last missing while claims differed."""
        self._next_look = 0.0
        self._extent = 0
        """The newest round of which we knew anything when we went away, and of all those since."""
        self._company: frozenset[bytes] | None = None
        """Who was there then, None if that is not known."""
        self._returns_until = 0.0
        self._outlived_since: float | None = None
        """Since when those who are heard say so."""
        self._given_up: Claim | None = None
        """The newest snapshot that we held, while we begin anew from the swarm's."""
        self._ahead_at = 0.0
        """When somebody was last there, since then, who went on."""

    @property
    def joined(self) -> bool:
        return bool(self.claims)

    @property
    def begins_anew(self) -> bool:
        """Whether what we hold is given up, and the swarm's snapshot not here yet."""
        return self._given_up is not None

    @property
    def may_be_outlived(self) -> bool:
        """Whether those who are heard say that the swarm went on without us, and it is not settled yet."""
        return self._outlived_since is not None

    @property
    def is_in_a_hurry(self) -> bool:
        """Whether `deadline` is sooner than others' and is to be kept."""
        return not self.joined or self._returns_until > 0.0

    def restore(self, claims: Claims, floor: int, extent: int = 0) -> None:
        """Take over what a previous run held; it knew of rounds up to `extent`."""
        self.claims = claims
        self._claimed = {claim.round: claim for claim in claims[:1]}
        self.floor = floor
        self.came_back(extent)

    def came_back(self, extent: int, company: frozenset[bytes] | None = None) -> None:
        """We were away, stopped or asleep, and know of rounds up to `extent`. `company`: who was there then.

        Who was not had been cut off from us, or we from it: then neither history is the one that went on.
        If we have not looked since we came back the last time, for want of a network, that was no return.
        """
        if self._returns_until == inf or self.begins_anew:
            return
        self._extent = max(extent, self.floor, *(claim.round for claim in self.claims))
        self._company = company
        self._outlived_since = None
        self._returns_until = inf if self.claims else 0.0

    def sealed(self, claims: Claims) -> None:
        """Our snapshots have changed."""
        if self.begins_anew:
            return  # one that was being written is of what is given up
        if self.claims and claims[0].round <= self.claims[0].round:
            self._claimed.clear()  # a late record: what we said of the rounds before may not hold any more
        self.claims = claims
        self._claimed |= {claim.round: claim for claim in claims[:1]}
        for round_ in sorted(self._claimed)[:-CLAIMED_MAX]:
            del self._claimed[round_]

    def adopted(self, claim: Claim) -> None:
        """Phi is now that snapshot: our history begins there."""
        self.claims = (claim,)
        self._given_up, self._returns_until, self._outlived_since = None, 0.0, None
        self._claimed = {claim.round: claim}
        self.floor = claim.round
        self.adopting = None
        self._asked_to_seal = claim.round
        self._clocks.clear()  # what the clock said may have been of the history before
        self._differs_since = self._unanswered_since = self._behind_since = None

    def unusable(self, claim: Claim) -> None:
        """That snapshot cannot be adopted by anybody: our own history goes on, or another one is chosen."""
        if self.adopting is not None and self.adopting.root == claim.root:
            self.adopting = None
            self._differs_since = None  # what differs besides has to last as long

    def deadline(self) -> float:
        return self._next_look

    def wake(
        self,
        now: float,
        clock: int,
        members: Sequence[Witness],
        share_lacking: Callable[[int], float] = lambda round_: 0.0,
        contributors: Callable[[], Sequence[Claims]] | None = None,
        is_stalled: Callable[[Claim], bool] = lambda claim: False,
        authors: Callable[[], int] = lambda: 0,
    ) -> list[Effect]:
        """Look at the members' claims.

        `share_lacking` tells of how many of the authors, from 0 to 1, payloads up to a round are missing here
        that somebody holds. `contributors` gives the claims of those whose deltas are here; without it, all
        count as such. `is_stalled` tells whether a snapshot is being fetched and nothing of it comes.
        `authors` counts the members, live or not, of whom we know deltas.
        """
        if now < self._next_look:
            return []
        self._next_look = now + self._look_interval(now)
        others = [member.claims for member in members]
        if self.adopting is not None:
            if self._is_gone(self.adopting, others, now) or (
                # One liar can claim for ever what it does not serve.
                is_stalled(self.adopting) and self._joining.prefers_another(self.adopting, members)
            ):
                self.adopting = None
            return []
        if not self.joined:
            return self._join(members, now)
        if self._is_outlived(clock, members, now):
            return self._begin_anew(members, now)
        if self.may_be_outlived:
            return []
        back = self._go_back(members, authors, now)
        if back:
            return back
        settled = self._settled(clock, now)
        return [
            *self._seal(settled),
            *self._close(settled, others),
            *self._settle_difference(members, contributors or (lambda: others), share_lacking, now),
        ]

    def _look_interval(self, now: float) -> float:
        if not self.joined and self.adopting is None:
            return JOINING_LOOK_S
        return RETURN_LOOK_S if now < self._returns_until else LOOK_INTERVAL_S

    # -- joining

    def _is_outlived(self, clock: int, members: Sequence[Witness], now: float) -> bool:
        """Whether those whom we left have closed rounds, while we were away, that we never heard of.

        Nobody has those any more. Without them what came after makes another model than theirs, and those
        who came back together could be most of the swarm.
        """
        if now >= self._returns_until:
            self._returns_until, self._outlived_since = 0.0, None
            return False
        self._returns_until = min(self._returns_until, now + RETURN_S)
        # What others who were away publish now, late, tells nothing of those rounds.
        away = {member.node_id for member in members}.difference(
            member.node_id for member in self._who_went_on(members)
        )
        while all(self._tells_of(self._extent + 1 + after, away) for after in (0, ROUNDS_UNDER_WAY)):
            self._extent += 1  # by now we take part, or had not been gone for long
        ahead = self._who_went_on(members)
        known = any(self._company is None or member.node_id in self._company for member in ahead)
        if not known or closable_round(clock, clock, self._section) <= self._extent:
            self._outlived_since = None
            return False
        if self._outlived_since is None:
            self._outlived_since = now
        return now - self._outlived_since >= limits.ROSTER_PATIENCE_S  # the first to be heard may be a liar

    def _who_went_on(self, members: Sequence[Witness]) -> list[Witness]:
        """Whose word about the past is newer than all that we knew."""
        return [member for member in members if member.claims and member.claims[0].round > self._extent]

    def _begin_anew(self, members: Sequence[Witness], now: float) -> list[Effect]:
        text = (
            f"we were away since round {self._extent}, and the swarm has closed rounds since: starting again"
            " from its snapshot"
        )
        self._given_up, self._ahead_at = self.claims[0], now
        self.claims, self._is_first, self._returns_until = (), False, 0.0
        self._claimed.clear()
        self._joining = Joining(self._trusted)
        return [Notice(text), *self._join(members, now)]

    def _go_on_without(self, given_up: Claim, now: float) -> list[Effect]:
        """Who went on is gone with what they had: better their history is lost than that nobody has any."""
        text = f"whoever went on is gone: going on from our own snapshot of round {given_up.round}"
        return [Notice(text), *self._adopt(given_up, now)]

    def _join(self, members: Sequence[Witness], now: float) -> list[Effect]:
        if self._is_first:
            return self._adopt(self.genesis, now)
        if self._given_up is not None:
            members = self._who_went_on(members)
            if members:
                self._ahead_at = now
            elif now - self._ahead_at > limits.OUTLIVED_PATIENCE_S:
                return self._go_on_without(self._given_up, now)
        best, said = self._joining.choose(members, now)
        return said if best is None else self._adopt(best, now)

    def _adopt(self, claim: Claim, now: float) -> list[Effect]:
        self.adopting = claim
        self._claimed_at = now
        return [Adopt(claim)]

    def _is_gone(self, claim: Claim, others: Sequence[Claims], now: float) -> bool:
        if self._is_first or claim == self._given_up or any(claim in claims for claims in others):
            self._claimed_at = now
        return now - self._claimed_at > GONE_AFTER_S

    # -- once joined

    def _settled(self, clock: int, now: float) -> int:
        """Where the clock stood some seconds ago, and still does.

        Alone it reads our own last round, which may lie far beyond what the others have reached: so in the
        first moment after a start, if we had gone back to where they are.
        """
        self._clocks.append((now, clock))
        settled = 0
        while self._clocks and self._clocks[0][0] <= now - limits.SEAL_SETTLE_S:
            settled = self._clocks.popleft()[1]
        return min(settled, clock)

    def _seal(self, settled: int) -> list[Effect]:
        """A snapshot is due by a clock that has settled."""
        last = max(self._asked_to_seal, self.claims[0].round)
        target = roundest(last, sealed_round(settled, self._section), self._section.snapshot_every)
        if target is None:
            return []
        self._asked_to_seal = target
        return [Seal(target)]

    def _close(self, settled: int, others: Sequence[Claims]) -> list[Effect]:
        # Costs little and is most often the end of it: others can only agree on less than what we claim.
        if closable_round(self.claims[0].round, settled, self._section) <= self.floor:
            return []
        everyone = [self.claims, *(claims for claims in others if claims)]
        ours = (claim for claims in everyone for claim in claims if self._claimed.get(claim.round) == claim)
        newest = agreed(ours, len(everyone))
        if newest is None:
            return []
        floor = closable_round(newest.round, settled, self._section)
        if floor <= self.floor:
            return []
        self.floor = floor
        return [Close(floor)]

    def _settle_difference(
        self,
        members: Sequence[Witness],
        contributors: Callable[[], Sequence[Claims]],
        share_lacking: Callable[[int], float],
        now: float,
    ) -> list[Effect]:
        """Two lineages: ours yields if another claim for our round outweighs it and stays.

        Names are free in an open swarm, so those who never contributed have no voice against our history.
        Nor has a word against it that was given before we lost sight of all who gave it: what we published
        then, and they do not have, may be the difference.
        """
        others = [member.claims for member in members]
        if self._differs_since is None and not self._is_disputed(others):  # as nearly always: it costs little
            if self._unanswered_since is not None and any(self.claims[0] in claims for claims in others):
                self._unanswered_since = None
            return []
        claims = contributors()
        winner = contest(self.claims[0], claims) or self._unanswered(claims, now)
        fresh = [member.claims for member in members if now - member.told <= WORD_S]
        if winner is None or not any(winner in claims for claims in fresh):
            # With fast rounds members seldom claim the very round that we do: silence proves nothing.
            if any(claim.round == self.claims[0].round for of_one in claims for claim in of_one):
                self._differs_since = None
            return []
        if self._differs_since is None or now - self._differed_at > DIFFERENCE_KEPT_S:
            self._differs_since = now
        self._differed_at = now
        if self._may_be_explained(share_lacking(self.claims[0].round), self._differs_since, now):
            return []
        text = (
            f"TWO LINEAGES: the swarm's history up to round {winner.round} has deltas of {winner.tokens}"
            f" tokens, ours {self.claims[0].tokens}; starting again from the swarm's snapshot, keeping the"
            " open window"
        )
        return self._yield(winner, text, now)

    def _go_back(self, members: Sequence[Witness], authors: Callable[[], int], now: float) -> list[Effect]:
        """Two lineages of which the other, that of most members, is at rounds that we have closed already.

        A fast node that was cut off goes by its own clock alone, and may be hours ahead of the others when
        it hears of them again. Each refuses the other's records then, and claims never name the same round.
        Who has published nothing since it came back is not among them: it may find out yet that we went on.
        Nor is who is not there: a few liars might be most of those who are, for a moment.
        """
        said = [member for member in members if member.claims and now - member.told <= WORD_S]
        behind = [
            member
            for member in said
            if 0 < member.round <= self.floor and all(claim.round < self.floor for claim in member.claims)
        ]
        if not behind or 2 * len(behind) <= 1 + max(len(said), authors()):
            self._behind_since = None
            return []
        if self._behind_since is None:
            self._behind_since = now
        winner = believable(behind)
        if winner is None or now - self._behind_since < self._patience(now):
            return []
        at, last = max(member.round for member in behind), self._own_last()
        text = (
            f"TWO LINEAGES: cut off from most members we closed rounds up to {self.floor}, and they are at"
            f" round {at}; starting again from their snapshot of round {winner.round}: what we published"
            " meanwhile is given up"
        )
        if last > at:
            text += f", and they have {last - at} rounds to go, those that we signed, until we publish again"
        return self._yield(winner, text, now)

    def _yield(self, winner: Claim, text: str, now: float) -> list[Effect]:
        self._yields.append(now)
        return [Notice(text), *self._adopt(winner, now)]

    def _patience(self, now: float) -> float:
        """How long a difference has to last before our history is given up: longer each time."""
        while self._yields and now - self._yields[0] > limits.LINEAGE_MEMORY_S:
            self._yields.popleft()
        return limits.LINEAGE_PATIENCE_S * 2.0 ** len(self._yields)

    def _unanswered(self, claims: Sequence[Claims], now: float) -> Claim | None:
        """The claim that wins without those who claim other rounds, once they have been waited for."""
        own = self.claims[0]
        of_round = [of_one for of_one in claims if any(claim.round == own.round for claim in of_one)]
        winner = contest(own, of_round)
        if winner is None:
            if of_round:
                self._unanswered_since = None
            return None
        if self._unanswered_since is None or now - self._unanswered_at > DIFFERENCE_KEPT_S:
            self._unanswered_since = now
        self._unanswered_at = now
        return winner if now - self._unanswered_since >= SILENCE_S else None

    def _may_be_explained(self, share_lacking: float, since: float, now: float) -> bool:
        """Whether a difference that shows `since` then may come of records or payloads on their way."""
        patience = self._patience(now)
        if not share_lacking:
            return now - since < patience
        if share_lacking > MINORITY:
            self._lacked_much_at = now
        patience = max(patience, limits.LINEAGE_MINORITY_PATIENCE_S)
        return now - max(since, self._lacked_much_at) < patience

    def _is_disputed(self, others: Sequence[Claims]) -> bool:
        """Whether anybody claims something else than we do for the round that we claim."""
        own = self.claims[0]
        return any(claim.round == own.round and claim != own for claims in others for claim in claims)
