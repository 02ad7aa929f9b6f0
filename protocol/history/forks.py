"""A fork: two histories. When we give ours up for another one that members share (see `claims`).

Node ids are free in an open swarm, and one key can make two histories differ. So a difference has to last
before it counts, and longer each time that we have yielded lately. Payloads on their way may explain it, and
are waited for, though not for ever. Each clause has its test in ``tests/protocol/test_forks.py``, and most of
them a mutant of the simulator.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from gossamer.protocol import limits
from gossamer.protocol.gossip.announce import Author
from gossamer.protocol.history.claims import PeerClaims, winning_claim
from gossamer.protocol.history.joining import believable
from gossamer.protocol.records import Claim, Claims

FRESH_S = 7.5
"""How long what a member says is fresh where it is said again every 4.5 s. What we published before it came
has reached somebody by then."""

DIFFERENCE_KEPT_S = 60.0
"""A difference is remembered for this long while nobody claims the round that we do
(`test_a_difference_that_shows_now_and_then_is_one_all_the_same`)."""


Defeat = tuple[Claim, str]
"""Our history is to be given up: the snapshot to start again from, and what to tell the user."""


class Forks:
    """Compares our history with the members' histories, and remembers how often we have yielded."""

    def __init__(self, author: Author) -> None:
        """`author`: knows the last round that we have signed."""
        self._author = author
        self._differs_since: float | None = None
        """Since when another history has won against ours, now and then."""
        self._differed_at = 0.0
        self._yields: deque[float] = deque(maxlen=limits.FORK_DOUBLINGS_MAX)
        """When we gave up our history for another one, lately."""

    def begin_anew(self) -> None:
        """Our history is another one now, or nobody can adopt the winner: what comes has to last as long."""
        self._differs_since = None

    def verdict(
        self, claimed: Mapping[int, Claim], floor: int, peers: PeerClaims, now: float
    ) -> Defeat | None:
        """Whether another history than ours wins, and has done so for long enough.

        `claimed`: what we have claimed lately and stand by, by round; where rounds are fast, members seldom
        claim our newest. `floor`: the round up to which we have closed. A difference has to last longer each
        time that we yield, and longer where payloads may explain it.
        """
        defeat = self._left_behind(floor, peers, now) or self._outweighed(claimed, peers, now)
        if defeat is None:
            return None
        if self._differs_since is None or now - self._differed_at > DIFFERENCE_KEPT_S:
            self._differs_since = now
        self._differed_at = now
        while self._yields and now - self._yields[0] > limits.FORK_MEMORY_S:
            self._yields.popleft()
        patience = limits.FORK_PATIENCE_S * 2.0 ** len(self._yields)
        if peers.lacks_payloads(defeat[0].round, now):
            patience = max(patience, limits.FORK_MINORITY_PATIENCE_S)
        if now - self._differs_since < patience:
            return None
        self._yields.append(now)
        return defeat

    def _outweighed(self, claimed: Mapping[int, Claim], peers: PeerClaims, now: float) -> Defeat | None:
        """Whether another claim for a round that we have claimed outweighs ours.

        Node ids are free in an open swarm, so members that never
        contributed have no voice against our history. Nor does a claim against our history count once all
        members that made it are out of sight: what we published since, and they do not have, may be the
        difference (`test_only_what_contributors_still_say_counts`).
        """
        members, fresh_s = peers.members(), FRESH_S + peers.delay_s
        if self._differs_since is None and not _disputed(claimed, (member.claims for member in members)):
            return None  # as nearly always: this costs little
        contributors = peers.contributors()
        fresh = {claim for one in members if now - one.said_at <= fresh_s for claim in one.claims}
        disputed = _disputed(claimed, contributors) or [claimed[max(claimed)]]
        for ours in disputed:
            # What a member shares with us holds all that came before, see
            # `test_who_shares_our_newest_claim_stands_by_all_that_came_before`.
            voices = [
                (ours,) if _shared(of_one, claimed) >= ours.round else of_one for of_one in contributors
            ]
            winner = winning_claim(ours, voices)
            if winner is not None and winner in fresh:
                break
        else:
            # Where rounds are fast, members seldom claim the very round that we do: silence proves nothing
            # (`test_a_difference_that_members_of_our_round_end_begins_anew`).
            if any(claim.round == disputed[0].round for of_one in contributors for claim in of_one):
                self._differs_since = None
            return None
        text = (
            f"A FORK: the swarm's history up to round {winner.round} has deltas of {winner.tokens} tokens,"
            f" ours {ours.tokens}; starting again from the swarm's snapshot, keeping the open window"
        )
        return winner, text

    def _left_behind(self, floor: int, peers: PeerClaims, now: float) -> Defeat | None:
        """Whether the other history, that of most members, is at rounds up to `floor`, which we have closed.

        A fast node that was cut off goes by its own clock alone, and may be hours ahead of the others when it
        hears of them again. Each side then refuses the other's records, and claims never name the same round.
        A member that has published nothing since it came back does not count as behind: it may still find out
        that we went on. Who does not train counts on neither side, since it never publishes; nor do we, if we
        have not. Absent members count against it: those present may be mostly liars for a moment
        (`test_nothing_less_takes_it_back`, `test_who_does_not_train_counts_on_neither_side`).
        """
        fresh_s = FRESH_S + peers.delay_s
        said = [one for one in peers.members() if one.trains and one.claims and now - one.said_at <= fresh_s]
        behind = [
            one for one in said if 0 < one.round <= floor and all(claim.round < floor for claim in one.claims)
        ]
        ours = int(self._author.last_round > 0)
        if not behind or 2 * len(behind) <= ours + max(len(said), peers.authors()):
            return None
        winner = believable(behind)
        if winner is None:
            return None
        at, last = max(one.round for one in behind), self._author.last_round
        text = (
            f"A FORK: cut off from most members, we closed rounds up to {floor}, while they are at round"
            f" {at}; starting again from their snapshot of round {winner.round}: what we published meanwhile"
            " is dropped"
        )
        if last > at:
            text += (
                f", and we publish again in {last - at} rounds, once the others are past those that we signed"
            )
        return winner, text


def _disputed(claimed: Mapping[int, Claim], others: Iterable[Claims]) -> Sequence[Claim]:
    """What we have claimed and members contradict, newest first.

    A claim before one that a member shares with us contradicts nothing: it has not been written again since a
    late record came, and never will be
    (`test_a_snapshot_that_a_late_record_has_outdated_contradicts_nobody_who_shares_the_next`).
    """
    return sorted(
        {
            claimed[claim.round]
            for of_one in others
            for shared in (_shared(of_one, claimed),)
            for claim in of_one
            if claim.round > shared and claimed.get(claim.round, claim) != claim
        },
        reverse=True,
    )


def _shared(of_one: Claims, claimed: Mapping[int, Claim]) -> int:
    """The newest round for which a member claims what we do; -1 if there is none."""
    return max((claim.round for claim in of_one if claimed.get(claim.round) == claim), default=-1)
