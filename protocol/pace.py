"""The swarm's pace: how long windows are, when a node publishes, and for which round.

Nobody waits and nobody runs away: a fast node takes more steps per round, a slow one publishes shorter
windows, and one that cannot finish a step skips rounds.

**How long a window is** can be fixed in the manifest. Otherwise the swarm sets it, as congestion control:
accuracy never asks for a longer window, only links do (docs/benchmarks.md). Each delta states how long its
author's window took, and how long into it the author had to wait until it had merged half of what the others
had published for the window before (`merge.freshness`). So freshness is the part of a window in which a node
trains on what the others know. Windows are to be as short as leaves them `1 - LATE` fresh.

Like Phi, the pace is a function of the set of merged records, so all nodes agree on it without a message. Of
an *epoch*, which is as many rounds as lie between two snapshots, the median member counts (`observe`). One
slow member of several does not lengthen everybody's windows; nor do liars move it beyond what the honest ones
state, while they are a minority. An epoch's observation asks for a length, in proportion: no step by step
search. The longest that any of the last `RECENT` epochs asked for holds from the epoch after the next on,
when the rounds that it depends on are sealed (`advance`). So windows get longer at once and shorter only
after a while, and a line that comes and goes does not make them swing.

**Turns.** What a round costs each member, payloads to fetch and to merge, grows with those who contribute to
it, and no line carries those of a thousand. So above `pace.contributors` members take turns: which of them
contribute to a round is drawn by a hash (`sampling.is_drawn`), and a node's windows span the rounds between
two turns of its own. How many members there are follows from the records of an epoch and from the turn that
each states (`publishers`), so sides of a partition, which come to turns of their own, add up when it heals.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gossamer.protocol.errors import PayloadError
from gossamer.protocol.limits import CLOCK_SKEW_S, ROUND_SLACK, TURN_MAX
from gossamer.protocol.manifest import Manifest, PaceSection
from gossamer.protocol.records import Delta
from gossamer.protocol.sampling import EVERY_ROUND, is_drawn, share


def round_clock(
    latest: Iterable[tuple[int, bytes]], members: int = 0, turn: int = EVERY_ROUND, since: int = 0
) -> int:
    """The highest of the latest rounds of live members, leaving out the top third (rounded down).

    So one liar cannot race the clock, and an isolated node still moves. 0 when there is nobody. `latest` are
    pairs of round and node id. `members` also counts those that have not told a round yet, so that a liar is
    left out even while few have. Where members take turns, a third of those whose turn it is is left out, and
    a round counts only if it was its member's turn, or is from before `turn` held: not after round `since`.
    """
    ordered = sorted(latest, reverse=True)
    out, clock = share(max(members, len(ordered)), turn) // 3, 0
    for round_, node_id in ordered:
        if round_ <= since or is_drawn(node_id, round_, turn):
            clock = round_
            if out == 0:
                break
            out -= 1
    return clock


@dataclass(frozen=True, slots=True)
class Pace:
    """Decides at an inner step boundary whether a node publishes, and for which round."""

    section: PaceSection
    fragments: int
    node_id: bytes = b""

    def due(
        self,
        own_last: int,
        clock: int,
        steps: int,
        seconds: float,
        window: int = 0,
        turn: int = EVERY_ROUND,
    ) -> int | None:
        """Return the round to publish now, or None.

        `steps` and `seconds` count since this node's previous delta of any fragment, or since the clock went
        past that: with F fragments a round is due F times in a window, so that fragments take turns instead
        of leaving all at once. `window`: the steps in a window, where the swarm sets them; for `turn`
        see `sampling.is_drawn`.

        A round that is open is published at once. To open the next takes the time of a round; and that of two
        for the one after it, where nobody whose turn is the next is there.
        """
        first = max(own_last + 1, clock)
        if steps < 1 or first > clock + 1:
            return None
        rounds = range(first, clock + self._filled(clock, steps, seconds, window) + 1)
        return next((r for r in rounds if is_drawn(self.node_id, r, turn)), None)

    def _filled(self, clock: int, steps: int, seconds: float, window: int) -> int:
        """How many rounds that follow the clock's one node may have opened by now."""
        # At their minimum length, or rounds would outrun `is_plausible`.
        most = int(seconds / self.section.min_round_seconds)
        if self.section.every_seconds:
            return min(most, int(seconds * self.fragments / self.section.every_seconds))
        length = self.section.every_steps or window or BEGIN_STEPS
        # Where a window does not divide evenly, rounds of it are longer and shorter by a step.
        last = clock * length // self.fragments + steps
        return min(most, ((last + 1) * self.fragments - 1) // length - clock)


def is_plausible(round_: int, manifest: Manifest, unix_s: float) -> bool:
    """Whether the swarm can have reached a round by this time, at the manifest's minimum round length."""
    age = unix_s - manifest.swarm.created + CLOCK_SKEW_S
    return round_ <= age / manifest.pace.min_round_seconds + ROUND_SLACK


# --- The length of a window, as the swarm sets it.

USUAL_STEPS = 30
"""The window that spans of rounds in a manifest (`retain`, say) are meant for, where the swarm sets it."""


def stretch(window: int) -> int:
    """By what factor such spans are longer, a power of two, in rounds of windows as short as `window`."""
    return 1 << max(0, (USUAL_STEPS // max(1, window)).bit_length() - 1)


BEGIN_STEPS = 10
MIN_STEPS, MAX_STEPS = 5, 8 * USUAL_STEPS
"""A window of fewer steps is hardly better, and costs more. One of more steps learns so much worse that a
codec that sends less is the better way out."""

LATE = 500
"""How late merges may come, in thousandths of a window. Up to here a shorter window is worth the staleness:
what is late by half of a short window is late by fewer steps than by a quarter of one twice as long."""

SHRINK_MAX, GROW_MAX = 4, 2
"""By what factor one epoch can ask for a shorter or a longer window. When merges do not come within a window
at all, it cannot be known how much longer it should be."""

RECENT = 2
"""How many epochs back the longest window asked for is looked for."""

DEAD_ZONE = 8
"""A change of less than an eighth is none."""

NOTHING_IN_COMMON = 10
"""Below this mean cosine of a round's deltas, in thousandths, they have nothing in common. Deltas of long
windows that drift apart are like that, so windows get shorter then, however late merges come."""

_LENGTH_BYTES = 2


class Observation(NamedTuple):
    """What the deltas of an epoch say, of the member in the middle of each figure."""

    members: int
    """How many state a window at all: in its first one, a node knows nothing yet."""
    late: int
    """How late merges came, in thousandths of a window, 0 to 1000."""
    agreement: int
    """Mean cosine of a round's deltas, in thousandths."""
    kbit_s: int
    """Payloads that each member received, kbit/s."""
    publishers: int
    """How many members published, counting those whose turn did not come."""


class PaceState(NamedTuple):
    """What the next epochs depend on: as of the end of an epoch."""

    lengths: tuple[int, int]
    """Steps in a window in the next epoch and in the one after."""
    turns: tuple[int, int]
    """How often a member contributes in these epochs, see `sampling.is_drawn`."""
    wishes: tuple[int, ...]
    """What each of the last epochs asked for, the newest last: `RECENT` of them, 0 where there was none."""

    def pack(self) -> bytes:
        values = (*self.lengths, *self.turns, *self.wishes)
        return b"".join(value.to_bytes(_LENGTH_BYTES, "big") for value in values)

    @classmethod
    def unpack(cls, data: bytes) -> "PaceState":
        """Inverse of `pack`. Raises PayloadError."""
        starts = range(0, PACE_BYTES, _LENGTH_BYTES)
        values = tuple(int.from_bytes(data[at : at + _LENGTH_BYTES], "big") for at in starts)
        possible = [MIN_STEPS <= value <= MAX_STEPS for value in values[:2]]
        possible += [value >= EVERY_ROUND for value in values[2:4]]
        if len(data) != PACE_BYTES or not all(possible):
            raise PayloadError("a snapshot with an impossible pace")
        return cls((values[0], values[1]), (values[2], values[3]), values[4:])


BEGIN = PaceState((BEGIN_STEPS, BEGIN_STEPS), (EVERY_ROUND, EVERY_ROUND), (0,) * RECENT)
PACE_BYTES = len(BEGIN.pack())


def observe(deltas: Iterable[Delta], manifest: Manifest) -> Observation:
    """What the deltas that were merged in an epoch say, in any order."""
    rounds, fragments = manifest.history.snapshot_every, manifest.layout.fragments
    took: dict[bytes, list[int]] = {}
    turns: list[int] = []
    sent = 0
    for delta in deltas:
        body = delta.body
        turns.append(body.turn)
        sent += body.payload_bytes
        if body.took:
            sums = took.setdefault(delta.author, [0, 0, 0, 0])
            for place, value in enumerate((1, body.took, body.late, body.agreement)):
                sums[place] += value
    # The median, so that few who state another turn count for little.
    turn = _middle(turns) if turns else EVERY_ROUND
    publishers = len(turns) * turn // (rounds * EVERY_ROUND)
    if not took:
        return Observation(0, 0, 0, 0, publishers)
    late = _middle([1000 * late // whole for _, whole, late, _ in took.values()])
    agreement = _middle([total // number for number, _, _, total in took.values()])
    window = _middle([whole // number for number, whole, _, _ in took.values()])
    rate = 8 * sent * fragments * turn // (window * rounds * EVERY_ROUND)
    return Observation(len(took), late, agreement, rate, publishers)


def turn_for(publishers: int, section: PaceSection) -> int:
    """How often each of so many members contributes, see `sampling.is_drawn`."""
    if not section.contributors:
        return EVERY_ROUND
    return max(EVERY_ROUND, min(EVERY_ROUND * publishers // section.contributors, TURN_MAX))


def _middle(values: list[int]) -> int:
    """The median; of an even number of values the larger in the middle: of two members, the one worse off."""
    return sorted(values)[len(values) // 2]


def advance(state: PaceState, seen: Observation, section: PaceSection) -> PaceState:
    """The state at the end of the next epoch, in which this was seen."""
    turns = state.turns[1], turn_for(seen.publishers, section)
    length, following = state.lengths
    if not section.is_set_by_swarm:
        return state._replace(turns=turns)
    wish = length
    if seen.members:
        wish = -(-length * seen.late // LATE)
        if section.max_mbit:
            wish = max(wish, -(-length * seen.kbit_s // max(1, int(1000 * section.max_mbit))))
        if seen.agreement < NOTHING_IN_COMMON and length > USUAL_STEPS:
            wish = min(wish, length // 2)
        wish = max(length // SHRINK_MAX, min(wish, length * GROW_MAX))
    wish = max(MIN_STEPS, min(wish, MAX_STEPS))
    wishes = (*state.wishes[1:], wish)
    longest = max(wishes)
    if DEAD_ZONE * abs(longest - following) < following:
        longest = following
    return PaceState((following, longest), turns, wishes)


class Windows(NamedTuple):
    """How long windows are in the epoch that comes after a round, and in the one after that."""

    after: int
    """The round, at the end of an epoch."""
    lengths: tuple[int, int]
    """Steps; 0 if windows are counted in seconds."""
    turns: tuple[int, int]
    """How often a member contributes, see `sampling.is_drawn`."""
    why: str
    """When and why they last changed, for a person; empty if they have not, as far as is known here."""


class PaceFold:
    """The pace above a base, kept up to date while rounds are merged."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._every = manifest.history.snapshot_every
        self._seen: dict[int, Observation] = {}
        """By epoch, as far as its set has not changed since it was observed."""

    def changed(self, round_: int) -> None:
        """Other records are merged of a round now."""
        self._seen.pop((round_ - 1) // self._every, None)

    def as_of(
        self, round_: int, base: int, state: PaceState, rounds: Mapping[int, Sequence[Delta]]
    ) -> PaceState:
        """The state as of a round at the end of an epoch, from that as of the end of another, `base`, and the
        records merged in the rounds after that."""
        for _, seen in self._epochs(round_, base, rounds):
            state = advance(state, seen, self._manifest.pace)
        return state

    def windows(
        self, round_: int, base: int, state: PaceState, rounds: Mapping[int, Sequence[Delta]]
    ) -> Windows:
        """As of the last end of an epoch up to this round, which is `base` or above."""
        section, after, why = self._manifest.pace, round_ // self._every * self._every, ""
        for end, seen in self._epochs(after, base, rounds):
            before, state = state.lengths[1], advance(state, seen, section)
            if state.lengths[1] != before:
                late, agreement, rate = seen.late / 10, seen.agreement / 1000, seen.kbit_s / 1000
                why = (
                    f"from round {end + self._every + 1} on, {before} before: merges came {late:.0f} % of a"
                    f" window late, at {rate:.3g} Mbit/s and an agreement of {agreement:.2f}"
                )
        fixed = (section.every_steps, section.every_steps)
        return Windows(after, state.lengths if section.is_set_by_swarm else fixed, state.turns, why)

    def _epochs(
        self, round_: int, base: int, rounds: Mapping[int, Sequence[Delta]]
    ) -> Iterator[tuple[int, Observation]]:
        """What is seen in each epoch between two rounds, and the round at its end."""
        for end in range(base + self._every, round_ + 1, self._every):
            epoch = end // self._every - 1
            if epoch not in self._seen:
                of_epoch = (d for r in range(end - self._every + 1, end + 1) for d in rounds.get(r, ()))
                self._seen[epoch] = observe(of_epoch, self._manifest)
            yield end, self._seen[epoch]
