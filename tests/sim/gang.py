"""Several Byzantine members: each does wrong for itself, as a `liar` does, and now and then all do the same.

Together they claim one made-up past, for whatever rounds others claim, and serve it. They sign second deltas
just after others have sealed. They link to everybody and serve nothing, or rubbish just before a request
would be given up. They each tell their neighbours of only some members, and leave and come back. Each of them
sees all that others claim, at once.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence

from gossamer.protocol import messages as msg
from gossamer.protocol.limits import CLAIMS_MAX, FETCH_OVERDUE_S, FETCH_PATIENCE_S
from gossamer.protocol.membership.member_records import Presence
from gossamer.protocol.payloads import chunk_hashes, root_of
from gossamer.protocol.records import Claim
from gossamer.protocol.replica import Replica
from tests.sim.exchange import LateAnswerError
from tests.sim.liar import Liar, Standing
from tests.sim.network import End
from tests.sim.node import Node

WATCH_S = 1.0
PAUSE_S = (5.0, 30.0)
LASTS_S = (30.0, 150.0)


class Gang:
    """Makes its members do the same thing at the same time."""

    def __init__(self, nodes: Sequence[Node], others: Callable[[], list[Node]], quiet_after: float) -> None:
        """`others`: returns the honest nodes that run."""
        self._loop = nodes[0].stage.loop
        self._rng: random.Random = nodes[0].stage.dice("gang")
        self._trace = nodes[0].stage.trace
        self._others = others
        self._quiet_after = quiet_after
        self._members = [Accomplice(node, quiet_after) for node in nodes]
        self._nodes = list(nodes)
        self._lies: dict[int, Claim] = {}
        self._ahead = 0
        """How many rounds further than it is we say the swarm is."""
        self._until = 0.0
        self._sealed = 0
        """The newest round that any honest node claimed when we last looked."""

    def begin(self) -> None:
        """Begin to act, each for itself and all together."""
        for member in self._members:
            self._loop.after(10.0 * self._rng.random(), member.act)
        self._agree()

    def _agree(self) -> None:
        """Agree on one deed for a while, and then on another one."""
        if self._loop.now > self._quiet_after:
            return
        self._until = min(self._quiet_after, self._loop.now + self._rng.uniform(*LASTS_S))
        deeds = (self._claim_alike, self._claim_alike, self._equivocate_after_seals, self._each)
        deed = deeds[self._rng.randrange(len(deeds))]
        self._trace.say(self._loop.now, f"the liars agree: {deed.__name__[1:]} until {self._until:.0f} s")
        deed()
        self._loop.at(self._until + self._rng.uniform(*PAUSE_S), self._agree)

    def _each(self) -> None:
        """Each member does the same one of the deeds that one can do alone."""
        member = self._members[0]
        names = [deed.__name__ for deed in (*member.long_deeds, *member.long_deeds, *member.deeds)]
        name = names[self._rng.randrange(len(names))]
        for member in self._members:
            if member.can_act:
                getattr(member, name)()

    # -- one past

    def _claim_alike(self) -> None:
        """Claim one made-up past; and, if we are too few to move the clock, that the swarm is far ahead."""
        history = self._nodes[0].stage.manifest.history
        far = history.retain + 2 * (history.seal_after + history.snapshot_every)
        self._ahead = far if self._are_few() and self._rng.random() < 0.5 else 0
        for member, node in zip(self._members, self._nodes, strict=True):
            if node.running:
                member.stand_for(lambda node=node: (node.core.own_last + self._ahead, self._claims(node)))
                self._loop.at(self._until, member.stand_for, None)
                member.tell_of({other.traits.identity.node_id for other in self._nodes}, self._until)

    def _are_few(self) -> bool:
        """Whether we cannot move the clock, which leaves out the top third; some nodes may be away."""
        return 4 * len(self._nodes) < len(self._others())

    def _claims(self, node: Node) -> tuple[Claim, ...]:
        """Lies for the newest round that others claim, the next one, and those that the fewest claim."""
        claimed = Counter(claim.round for other in self._others() for claim in other.core.sealing.claims[:1])
        rounds = sorted(filter(None, claimed), key=lambda round_: (claimed[round_], round_))
        if not rounds or node.fold is None:
            return node.core.sealing.claims
        step = node.stage.manifest.history.snapshot_every
        newest = max(rounds) + self._ahead // step * step
        chosen = {newest, newest + step, *rounds[: CLAIMS_MAX - 2]}
        return tuple(self._lie(node, round_) for round_ in sorted(chosen, reverse=True))

    def _lie(self, node: Node, round_: int) -> Claim:
        """What all of us claim for a round, and serve."""
        if round_ not in self._lies:
            assert node.fold is not None
            data = (node.fold.phi + 1).tobytes()
            hashes = chunk_hashes(data)
            self._lies[round_] = Claim(round_, 2**59, self._rng.randbytes(32), root_of(hashes))
            for other in self._nodes:
                other.disk.put(hashes[0], data, self._loop.now)
                other.disk.put(self._lies[round_].root, b"".join(hashes), self._loop.now)
        return self._lies[round_]

    # -- equivocation

    def _equivocate_after_seals(self) -> None:
        """Whenever a node has sealed, one of us signs again for the last round of that snapshot."""
        if self._loop.now >= self._until:
            return
        sealed = max((claim.round for n in self._others() for claim in n.core.sealing.claims), default=0)
        member = self._members[self._rng.randrange(len(self._members))]
        if sealed > self._sealed and member.can_act:
            member.equivocate_in(sealed)
        self._sealed = max(sealed, self._sealed)
        self._loop.after(WATCH_S, self._equivocate_after_seals)


class Accomplice(Liar):
    """One of a gang: does what a liar does, and deeds that last longer."""

    def __init__(self, node: Node, quiet_after: float) -> None:
        super().__init__(node, quiet_after, dice=f"liar {node.index}")
        self._standing: Standing | None = None
        self.long_deeds: tuple[Callable[[], None], ...] = (
            self._link_to_all_and_send_nothing,
            self._answer_rubbish_late,
            self._tell_each_of_others,
            self._come_and_go,
        )
        self.deeds = (*self.deeds, *self.long_deeds)

    def stand_for(self, standing: Standing | None) -> None:
        """Claim this instead of the truth, and return to it after each lie of our own; None: the truth."""
        self._standing = standing
        self._tell_the_truth(self._node.core)

    def _tell_the_truth(self, core: Replica) -> None:
        super()._tell_the_truth(core)
        if self._standing is not None:
            self._state(core, self._standing)

    @property
    def can_act(self) -> bool:
        return self._node.responsive and bool(self._node.links)

    def equivocate_in(self, round_: int) -> None:
        """Sign two deltas for one round; others may have a third one of ours."""
        if self._node.fold is not None:
            for _ in range(2):
                payload = self._payload(round_)
                self._node.keep(payload, durable=False)
                self._to_some(msg.Records(((self._sign(self._body(round_, payload)).data, True),)))

    def _link_to_all_and_send_nothing(self) -> None:
        node = self._node
        for member in node.core.roster.members():
            for address in member.record.body.addresses:
                if node.core.links.to(member.record.node_id) is None:
                    node.stage.net.dial(node, address)
        self._claim_all(self._send_nothing())

    def _answer_rubbish_late(self) -> None:
        """Send wrong bytes for every chunk, just before another node is asked or the request is given up."""
        transfers, loop = self._node.transfers, self._node.stage.loop

        def give(blob: bytes) -> bytes | None:
            patience = FETCH_OVERDUE_S if self._rng.random() < 0.5 else FETCH_PATIENCE_S
            raise LateAnswerError(patience - self._rng.random(), self._rng.randbytes(64))

        def asked(end: End | None, blob: bytes) -> None:
            seconds = FETCH_OVERDUE_S - self._rng.random()
            self._node.soon(seconds, type(transfers).asked, transfers, end, blob)

        transfers.give, transfers.asked = give, asked  # type: ignore[method-assign]
        transfers.read = lambda blob: self._rng.randbytes(64)  # type: ignore[method-assign]
        until = min(loop.now + 30.0 + 60.0 * self._rng.random(), self._quiet_after)
        loop.at(until, self._give_again, transfers)

    def _tell_each_of_others(self) -> None:
        """Tell others of about half of the members only, for a while."""
        known = [member.record.node_id for member in self._node.core.roster.members()]
        until = self._node.stage.loop.now + 20.0 + 60.0 * self._rng.random()
        self.tell_of({node_id for node_id in known if self._rng.random() < 0.5}, until)

    def tell_of(self, known: set[bytes], until: float) -> None:
        """Tell others of these members only, until then."""
        node, presence = self._node, self._node.core.presence

        def tell() -> None:
            for node_id in presence._news.keys() - known - {node.traits.identity.node_id}:
                del presence._news[node_id]
            type(presence)._send_news(presence)

        def exchange(link: int, message: msg.RosterSummary) -> None:
            others = [m.record.data for m in node.core.roster.members() if m.record.node_id in known]
            presence._send([presence.data, *others], [link])

        presence._send_news, presence.exchange = tell, exchange  # type: ignore[method-assign]
        presence.send_all = lambda link: exchange(link, msg.RosterSummary((), True))  # type: ignore[method-assign]
        node.stage.loop.at(until, self._tell_of_all, presence)

    @staticmethod
    def _tell_of_all(presence: Presence) -> None:
        for name in ("_send_news", "exchange", "send_all"):
            vars(presence).pop(name, None)

    def _come_and_go(self) -> None:
        """Announce that we leave and take it back, a few times; or stand still for a while."""
        node = self._node
        if self._rng.random() < 0.5:
            node.stop()
            node.stage.loop.after(8.0 + 15.0 * self._rng.random(), node.resume)
            return
        for time in range(6):
            node.soon(2.0 * time, self._say_whether_we_leave, time % 2 == 0)

    def _say_whether_we_leave(self, leaving: bool) -> None:
        core = self._node.core
        core.presence._leaving = leaving
        core.presence.beat()
        self._node._carry_out(core.outbox.drain())
