"""Checkers of safety and of bounds: they watch all along, and raise at the first broken promise.

* Equal sets of merged records give equal Phi, on every node and whatever the path to that set was.
* Only records that were really signed are merged, and at most one of each author in a round.
* No node knows a record of an honest author that is not on that author's disk ("write before you speak").
* No honest node signs a second record for a round once another node has taken in the first, whatever happened
  to it. A record that died with its author's disk before any other node heard of it is excepted: nobody could
  tell its author that it had signed.
* Snapshots of a round with equal digests are equal, and state the tokens that their records count for.
* No honest node blames another: the core accepts everything that a core says. Damaged bytes are refused.
* Queues, tables and flights keep to `protocol.limits`, no state of closed links is left, and a Wake always
  moves `next_wake` on.
* While nothing is wrong, payloads spread soon, and each chunk comes to each node once (`Spread`).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING

from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.effects import Blame
from gossamer.protocol.errors import Offence, PeerError
from gossamer.protocol.identity import short
from gossamer.protocol.records import Claim, Delta, open_envelope
from tests.sim.fold import Fold, Rounds, count
from tests.sim.loop import Loop
from tests.sim.network import End
from tests.sim.trace import Violation

if TYPE_CHECKING:
    from tests.sim.node import Node

WAKES_PER_S_MAX = 40.0
"""A core has six state machines with a deadline each, the fastest every second. A node with many flights
wakes more often. If a liar declines chunks, a node asks again soon, so each liar beyond the first may cost as
many wakes again. Wakes for chunks that arrived, one each, are not counted: those are announced."""

MIN_ROUND_S = 0.5
"""A node publishes no sooner after its last delta, see `scenario`."""

DEALS_MAX = 2
"""One of a node's own payloads is not spread yet, or two if it has just published the next."""

DEALS_OF_FAST_MAX = 1 + int(limits.DEAL_PATIENCE_S / MIN_ROUND_S)
"""The same for a node that is many times as fast: no deal lasts longer than its patience."""

CONTROL_BYTES_PER_S_MAX = 64 * 1024
"""What a node may send besides payloads, on average. Rows of 16 members, each renewed every 4.5 s, reach it
four times."""


PROMPT_S = 0.6
WAYS = 8
"""Half of all payloads arrive within PROMPT_S plus this many times the longest latency: a record, offers of
its parts, requests and chunks take several hops. A node that has to guess holders begins after 1 s."""

TWICE_MAX = 0.1
"""Share of chunks that may come to a node that has them, as when a link breaks at the wrong moment."""

LATE_S = 10.0
LATE_MAX = 0.01
"""Share of payloads that may take longer than LATE_S, however many a liar claims to hold: now and then a
silent holder costs each node some seconds."""

ENOUGH = 50
"""How many arrivals a judgement needs."""


class Audit:
    """Sees everything that honest nodes do."""

    def __init__(self, loop: Loop, swarm_id: bytes) -> None:
        self._loop = loop
        self._swarm_id = swarm_id
        self._known: dict[bytes, Delta] = {}
        self._spoken: dict[tuple[bytes, int], dict[bytes, Delta]] = {}
        """By author and round, then by id: the records that are durable, usually one. See `spoken`."""
        self._accepted: dict[tuple[bytes, int], bytes] = {}
        """By author and round: the first record that another node took in."""
        self._phis: dict[int, int] = {0: 0}
        self.liars: set[bytes] = set()
        """Node ids of the liars, from whom anything may come."""
        self.surrounded: set[Node] = set()
        """Nodes that reach, or reached until just now, hardly anybody but liars."""
        self._false: set[bytes] = set()
        """Digests of made-up pasts that an honest node has started from."""
        self.misled: set[Node] = set()
        """Nodes that started from a made-up past: what they publish until they are back may get lost."""
        self._payloads: dict[bytes, bytes] = {}
        self._histories: dict[bytes, Rounds] = {}
        self._claims: dict[tuple[int, bytes], tuple[Claim, int]] = {}
        self._expected: str | None = None
        self._blames = 0
        self.bytes_by_kind = [0] * 16
        self.wakes_per_s = 0.0
        self.spread = Spread(loop, self.fail)
        self.refused = 0
        """Number of damaged messages that were detected."""

    def fail(self, node: "Node | None", text: str) -> None:
        """Raise the violation."""
        who = f"{node.name} " if node is not None else ""
        raise Violation(f"at {self._loop.now:.3f} s: {who}{text}")

    # -- records

    def signed(self, node: "Node", delta: Delta) -> None:
        """A node really signed this record."""
        self._known[delta.record_id] = delta

    def spoken(self, node: "Node", delta: Delta) -> None:
        """A node's own record is durable: from now on others may see it."""
        key = delta.author, delta.round
        self._spoken.setdefault(key, {})[delta.record_id] = delta
        if self._accepted.get(key, delta.record_id) != delta.record_id and not node.traits.is_liar:
            self.fail(node, f"signed two deltas for round {delta.round}")

    def accepted(self, node: "Node", delta: Delta) -> None:
        """A node took a record in: unless it is on its author's disk, the author spoke too early."""
        key = delta.author, delta.round
        if delta.author in self.liars:
            return
        if delta.record_id not in self._spoken.get(key, ()):
            self.fail(
                node, f"knows {short(delta.author)}'s round {delta.round}, which its author has not on disk"
            )
        if self._accepted.setdefault(key, delta.record_id) != delta.record_id:
            self.fail(node, f"knows two deltas of {short(delta.author)} for round {delta.round}")

    def spoken_by(self, author: bytes) -> list[Delta]:
        """All records that a node has published."""
        return [
            delta for (by, _), deltas in self._spoken.items() if by == author for delta in deltas.values()
        ]

    def merged(self, node: "Node", fold: Fold, round_: int) -> None:
        """A round was merged, for the first time or again, on a node."""
        deltas = fold.rounds.get(round_, ())
        if len({delta.author for delta in deltas}) != len(deltas):
            self.fail(node, f"merged an author twice in round {round_}")
        for delta in deltas:
            if delta.record_id not in self._known:
                self.fail(node, f"merged record {short(delta.record_id)}, which nobody signed")
        if fold.base.chain in self._false:
            return
        phi = hash(fold.phi.tobytes())
        if self._phis.setdefault(fold.key, phi) != phi and fold.key:
            self.fail(node, f"has another Phi than a node with the same records (after round {round_})")

    def check_ledger(self, node: "Node") -> None:
        """Everything in a ledger was really signed."""
        for delta in node.core.ledger:
            if delta.record_id not in self._known:
                self.fail(node, f"accepted record {short(delta.record_id)}, which nobody signed")

    def keep(self, blob: bytes, data: bytes) -> None:
        """A payload chunk came into being."""
        self._payloads[blob] = data

    def payload(self, blob: bytes) -> bytes:
        """A payload chunk that came into being at some time, whatever became of it."""
        return self._payloads[blob]

    # -- history

    def sealed(self, node: "Node", claim: Claim, prefix: Fold) -> None:
        """A node wrote a snapshot. Equal digests must mean equal records and equal bytes, and the claim must
        state the tokens that all those records count for, closed ones included."""
        if prefix.base.chain in self._false:
            return
        history = self._histories.setdefault(claim.digest, {**prefix.below, **prefix.rounds})
        if not node.traits.is_liar and claim.tokens != count(node.stage.manifest, history):
            self.fail(node, f"sealed round {claim.round} with other tokens than its records count for")
        # Of the same records, the averaged model is another one as of another round.
        known, key = self._claims.setdefault((claim.round, claim.digest), (claim, prefix.key))
        if (known.root, known.tokens, key) != (claim.root, claim.tokens, prefix.key):
            self.fail(node, f"sealed round {claim.round} otherwise than a node with the same digest")

    def closed(self, fold: Fold) -> None:
        """A node closed rounds: note their records for nodes that start from there."""
        self._histories.setdefault(fold.base.chain, dict(fold.below))

    def adopted(self, node: "Node", claim: Claim, genesis: bytes) -> Rounds:
        """A node starts from a snapshot, which no liar may have made up; returns the records in it."""
        if claim.root != genesis and claim.digest not in self._histories and not node.traits.is_liar:
            if node not in self.surrounded:
                self.fail(node, f"starts from a past up to round {claim.round} that never was")
            self.misled.add(node)
            self._false.add(claim.digest)
        return self.history(claim.digest)

    def history(self, digest: bytes) -> Rounds:
        """The records that a chain of digests stands for."""
        return self._histories.get(digest, {})

    # -- blame

    def blamed(self, node: "Node", end: End | None, blame: Blame) -> None:
        """The core blames a peer. That peer must be a liar, or, which costs it nothing, one whose rounds this
        node's own wrong clock rules out."""
        self._blames += 1
        peer = end.peer.party if end is not None else None
        honest = not getattr(getattr(peer, "traits", None), "is_liar", False)
        is_forgiven = blame.offence is Offence.IMPLAUSIBLE and node.clock_is_wrong
        if honest and self._expected is None and not (node.traits.is_liar or is_forgiven):
            self.fail(node, f"blames an honest peer: {blame.reason}")

    @contextmanager
    def damage(self, node: "Node", data: bytes) -> Iterator[None]:
        """While a node handles damaged bytes: it must notice what a signature or the format shows."""
        self._expected = self._what_is_wrong(data)
        before = self._blames
        try:
            yield
            if self._expected and self._blames == before and not node.traits.is_liar:
                self.fail(node, f"took damaged bytes: {self._expected}")
            self.refused += self._blames > before
        finally:
            self._expected = None

    def _what_is_wrong(self, data: bytes) -> str:
        try:
            message = msg.decode(data)
            match message:
                case msg.Records():
                    for envelope, _ in message.entries:
                        open_envelope(envelope, self._swarm_id)
                case msg.NewDelta():
                    open_envelope(message.envelope, self._swarm_id)
        except PeerError as error:
            return str(error)
        return ""  # a flag or a number that only TLS protects

    # -- bounds

    def sending(self, node: "Node", data: bytes) -> None:
        """A message goes out."""
        size = len(data)
        self.bytes_by_kind[data[1]] += size
        if size > limits.MESSAGE_BYTES_MAX:
            self.fail(node, f"sends a message of {size} bytes")

    def woken(self, node: "Node", ahead: float) -> None:
        """A Wake was handled. The next one must lie ahead, or the daemon would spin."""
        if ahead <= 0.0:
            self.fail(node, "spins: next_wake has not moved on")

    def check_bounds(self, node: "Node", seconds: float) -> None:
        """Check one running node's tables; `seconds` have passed since the last check."""
        core = node.core
        rate = (node.wakes - node.chunks_came) / seconds
        node.wakes = node.chunks_came = 0
        self.wakes_per_s = max(self.wakes_per_s, rate)
        requests, links = core.fetcher.requests, core.links.numbers
        load = Counter([request.link for request in requests])
        deals_max = DEALS_OF_FAST_MAX if node.traits.is_fast else DEALS_MAX
        bounds = (
            ("wakes a second", rate, WAKES_PER_S_MAX * max(1, len(self.liars))),
            ("links", len(links), limits.LINKS_MAX),
            ("dials", len(core.links._dialling), limits.DIALS_AT_ONCE_MAX),
            ("requests", len(requests.current), limits.FETCHES_MAX + limits.GUESSES_MAX),
            ("requests on a link", max(load.values(), default=0), limits.FETCHES_PER_LINK_MAX),
            ("deals", len(core.announcer._deals), deals_max),
            ("members", len(core.roster.members()), limits.MEMBERS_MAX),
            ("vouches", len(core.membership._vouching), limits.MEMBERS_MAX),
            ("probes", len(core.membership._probes), limits.LINKS_MAX + len(core.roster.members())),
            (
                "awaited records",
                max((len(exchange.awaited) for exchange in core.anti_entropy._exchanges.values()), default=0),
                limits.IDS_PER_MESSAGE_MAX,
            ),
        )
        for what, value, most in bounds:
            if value > most:
                self.fail(node, f"has {value} {what}, over the limit of {most}")
        of_links = (
            core.fetcher._links.keys(),
            core.membership._links.keys(),
        )
        if any(known != links for known in of_links):
            self.fail(node, "does not agree with itself about its links")
        promised = {link for waiting in core.announcer._waiting.values() for link in waiting}
        leftovers = (set(core.anti_entropy._exchanges) | set(load) | promised) - links
        if leftovers:
            self.fail(node, f"keeps state of links that are gone: {sorted(leftovers)}")


class Spread:
    """Follows payloads from their publication to each node, in the calms between storms.

    If dealing or offers of parts fail, guesses and offers of whole payloads make up for it: a swarm without
    them still converges, only later and after requests in vain. So convergence does not show whether they
    work, but the time that a payload takes does.
    """

    def __init__(self, loop: Loop, fail: Callable[["Node | None", str], None]) -> None:
        self._loop = loop
        self._fail = fail
        self._is_watching = False
        self._born: dict[bytes, tuple[Delta, float]] = {}
        """Deltas published in this calm, and when, by the chunks of their payloads."""
        self._took: list[float] = []
        self._came = self._twice = 0

    def watch(self) -> None:
        """Nothing is wrong from now on."""
        self._is_watching = True

    def look_away(self) -> None:
        """Something is wrong: payloads under way may be delayed now."""
        self._is_watching = False
        self._born.clear()

    def published(self, delta: Delta) -> None:
        """A node's own delta is durable."""
        if self._is_watching:
            self._born.update(dict.fromkeys(delta.body.chunks, (delta, self._loop.now)))

    def chunk_came(self, node: "Node", blob: bytes, *, twice: bool) -> None:
        """A node received a chunk, and knows it. It may have been the last one of a payload."""
        self._came += 1
        self._twice += twice
        if twice or node.traits.is_liar or blob not in self._born:
            return
        delta, born = self._born[blob]
        began = max(node.linked_at, node.adopted_at)  # having given up its history, it took no records before
        if node.core.holds(delta.record_id) and began < born:
            self._took.append(self._loop.now - born)

    def judge(self, latency_s: float) -> None:
        """Judge, at the end. `latency_s`: the longest of all paths, seconds."""
        patience = PROMPT_S + WAYS * latency_s
        if len(self._took) >= ENOUGH and median(self._took) > patience:
            self._fail(None, f"half of all payloads took over {median(self._took):.1f} s, not {patience:.1f}")
        late = sum(took > LATE_S for took in self._took)
        if len(self._took) >= ENOUGH and late > LATE_MAX * len(self._took):
            self._fail(None, f"{late} of {len(self._took)} payloads took over {LATE_S:.0f} s")
        if self._came >= ENOUGH and self._twice > TWICE_MAX * self._came:
            self._fail(None, f"{self._twice} of {self._came} chunks came to nodes that had them")
