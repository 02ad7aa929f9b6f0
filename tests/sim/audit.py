"""Checkers of safety and of bounds: they look on all along, and raise at the first broken promise.

* Equal sets of merged records give equal Phi, on whichever node and however it got there.
* Only records that somebody really signed are merged, each author's once in a round.
* Nobody knows a record of an honest node that this node has not on disk ("write before you speak").
* No honest node signs two records for one round of which others take the first, whatever happened to it: of
  what died with its disk before anybody had heard of it, nobody can tell it.
* Snapshots with equal digests are equal, and say what their records count for.
* No honest node blames another: what the core says, the core accepts. Damaged bytes are refused.
* Queues, tables and flights keep to `protocol.limits`, state of links that are gone is gone, and a
  Wake always moves `next_wake` on.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.claims import Claim
from gossamer.protocol.core import intake
from gossamer.protocol.effects import Blame
from gossamer.protocol.errors import PeerError
from gossamer.protocol.identity import short
from gossamer.protocol.offence import Offence
from gossamer.protocol.records import Delta
from tests.sim.fold import Fold, Rounds, count
from tests.sim.loop import Loop
from tests.sim.network import End
from tests.sim.spread import Spread
from tests.sim.trace import Violation

if TYPE_CHECKING:
    from tests.sim.node import Node

WAKES_PER_S_MAX = 40.0
"""Six machines with a deadline each, the fastest every second; a node with many flights has more, and
whoever a liar declines chunks asks again soon, so each liar beyond the first may cost as many. One for each
chunk that came is added: it is told of."""

DEALS_MAX = 2
"""Of a node's own payloads one is not spread yet, or two when it has just published the next."""

CONTROL_BYTES_PER_S_MAX = 64 * 1024
"""What one node may send besides payloads, on average: 16 members' rows every 4.5 s reach it four times."""


class Audit:
    """Sees everything that honest nodes do."""

    def __init__(self, loop: Loop, swarm_id: bytes) -> None:
        self._loop = loop
        self._swarm_id = swarm_id
        self._known: dict[bytes, Delta] = {}
        self._spoken: dict[tuple[bytes, int], dict[bytes, Delta]] = {}
        """By author and round, as a rule one: see `spoken`."""
        self._accepted: dict[tuple[bytes, int], bytes] = {}
        """The first of those that another node took in."""
        self._phis: dict[int, int] = {0: 0}
        self.liars: set[bytes] = set()
        """Node ids of those from whom anything may come."""
        self.surrounded: set[Node] = set()
        """Those who reach, or just now reached, hardly anybody but liars."""
        self._false: set[bytes] = set()
        """Digests of pasts that never were, and that somebody has started from."""
        self.misled: set[Node] = set()
        """Those who started from a past that never was: what they publish until they are back may go."""
        self._payloads: dict[bytes, bytes] = {}
        self._histories: dict[bytes, Rounds] = {}
        self._claims: dict[bytes, tuple[Claim, int]] = {}
        self._expected: str | None = None
        self._blames = 0
        self.bytes_by_kind = [0] * 16
        self.wakes_per_s = 0.0
        self.spread = Spread(loop, self.fail)
        self.refused = 0
        """Damaged messages that were found out."""

    def fail(self, node: "Node | None", text: str) -> None:
        """Raise the violation."""
        who = f"{node.name} " if node is not None else ""
        raise Violation(f"at {self._loop.now:.3f} s: {who}{text}")

    # -- records

    def signed(self, node: "Node", delta: Delta) -> None:
        """Somebody really signed this."""
        self._known[delta.record_id] = delta

    def spoken(self, node: "Node", delta: Delta) -> None:
        """A node's own record is durable: from now on others may see it."""
        key = delta.author, delta.round
        self._spoken.setdefault(key, {})[delta.record_id] = delta
        if self._accepted.get(key, delta.record_id) != delta.record_id and not node.traits.is_liar:
            self.fail(node, f"signed two deltas for round {delta.round}")

    def accepted(self, node: "Node", delta: Delta) -> None:
        """A node took a record in: its author has written it down, or it spoke too early."""
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
        """All that a node has published."""
        return [
            delta for (by, _), deltas in self._spoken.items() if by == author for delta in deltas.values()
        ]

    def merged(self, node: "Node", fold: Fold, round_: int) -> None:
        """A round was merged anew on a node."""
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
        """Everything in a ledger was really signed, and no honest author is void."""
        for delta in node.core.ledger:
            if delta.record_id not in self._known:
                self.fail(node, f"accepted record {short(delta.record_id)}, which nobody signed")

    def keep(self, blob: bytes, data: bytes) -> None:
        """A payload came into being."""
        self._payloads[blob] = data

    def payload(self, blob: bytes) -> bytes:
        """A payload that came into being at some time, whatever became of it."""
        return self._payloads[blob]

    # -- history

    def sealed(self, node: "Node", claim: Claim, prefix: Fold) -> None:
        """A node wrote a snapshot: equal digests must mean equal records and equal bytes, and its tokens what
        all those records count for, whichever of them are closed here."""
        if prefix.base.chain in self._false:
            return
        history = self._histories.setdefault(claim.digest, {**prefix.below, **prefix.rounds})
        if not node.traits.is_liar and claim.tokens != count(node.stage.manifest, history):
            self.fail(node, f"sealed round {claim.round} with other tokens than its records count for")
        known, key = self._claims.setdefault(claim.digest, (claim, prefix.key))
        if (known.root, known.tokens, key) != (claim.root, claim.tokens, prefix.key):
            self.fail(node, f"sealed round {claim.round} otherwise than a node with the same digest")

    def closed(self, fold: Fold) -> None:
        """A node closed its past; whoever starts from there wants to know what is in it."""
        self._histories.setdefault(fold.base.chain, dict(fold.below))

    def adopted(self, node: "Node", claim: Claim, genesis: bytes) -> Rounds:
        """A node starts from a snapshot, which somebody wrote in good faith; returns what is in it."""
        if claim.root != genesis and claim.digest not in self._histories and not node.traits.is_liar:
            if node not in self.surrounded:
                self.fail(node, f"starts from a past up to round {claim.round} that never was")
            self.misled.add(node)
            self._false.add(claim.digest)
        return self.history(claim.digest)

    def history(self, digest: bytes) -> Rounds:
        """What a chain of digests stands for."""
        return self._histories.get(digest, {})

    # -- blame

    def blamed(self, node: "Node", end: End | None, blame: Blame) -> None:
        """The core blames a peer: a liar, or, at no cost, one whose rounds its own wrong clock rules out."""
        self._blames += 1
        peer = end.peer.party if end is not None else None
        honest = not getattr(getattr(peer, "traits", None), "is_liar", False)
        is_forgiven = blame.offence is Offence.IMPLAUSIBLE and node.clock_is_wrong
        if honest and self._expected is None and not (node.traits.is_liar or is_forgiven):
            self.fail(node, f"blames an honest peer: {blame.reason}")

    @contextmanager
    def damage(self, node: "Node", data: bytes) -> Iterator[None]:
        """While a node handles damaged bytes: it must notice whatever a signature or the format shows."""
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
            if isinstance(message, msg.Records):
                for envelope, _ in message.entries:
                    intake.open_envelope(envelope, self._swarm_id)  # type: ignore[attr-defined]
        except PeerError as error:
            return str(error)
        return ""  # a flag or a number that nothing protects but TLS

    # -- bounds

    def sending(self, node: "Node", data: bytes) -> None:
        """A message goes out."""
        size = len(data)
        self.bytes_by_kind[data[1]] += size
        if size > limits.MESSAGE_BYTES_MAX:
            self.fail(node, f"sends a message of {size} bytes")

    def woken(self, node: "Node", ahead: float) -> None:
        """A Wake was handled: the next one must lie ahead, or the daemon would spin."""
        if ahead <= 0.0:
            self.fail(node, "spins: next_wake has not moved on")

    def check_bounds(self, node: "Node", seconds: float) -> None:
        """Look at one running node's tables; `seconds` since the last look."""
        core = node.core
        rate = (node.wakes - node.chunks_came) / seconds
        node.wakes = node.chunks_came = 0
        self.wakes_per_s = max(self.wakes_per_s, rate)
        flights, links = core.fetcher._flights, core.links.numbers
        load = Counter([flight.link for flight in flights])
        bounds = (
            ("wakes a second", rate, WAKES_PER_S_MAX * max(1, len(self.liars))),
            ("links", len(links), limits.LINKS_MAX),
            ("dials", len(core.links._dialling), limits.DIALS_AT_ONCE_MAX),
            ("flights", len(flights), limits.FETCHES_MAX),
            ("flights of what is under way", len(flights.late), limits.FETCHES_TWICE_MAX),
            ("flights on a link", max(load.values(), default=0), limits.FETCHES_PER_LINK_MAX),
            ("deals", len(core.dealing._deals), DEALS_MAX),
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
            core.push._links,
            core.anti_entropy._links,
            core.fetcher._links.keys(),
            core.membership._links.keys(),
        )
        if any(known != links for known in of_links):
            self.fail(node, "does not agree with itself about its links")
        dealt = {link for deal in core.dealing._deals.values() for link in deal.links}
        promised = {link for waiting in core.offers._waiting.values() for link in waiting}
        leftovers = (set(core.anti_entropy._exchanges) | set(load) | dealt | promised) - links
        if leftovers:
            self.fail(node, f"keeps state of links that are gone: {sorted(leftovers)}")
