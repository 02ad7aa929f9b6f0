"""Byzantine members: nodes like the others that now and then do one of many wrong things.

A liar has a key and is admitted, so its signatures verify. It equivocates (two or three records for one
round, to different peers), forges others' records and sends garbage. It withholds payloads or parts of them,
or publishes payloads that do not decode. It claims to hold payloads that it has not, once or all the time. It
does not send what it has: it claims to hold everything, or lists others' chunks as its own, and never
answers. It signs for rounds of the far future, claims a made-up past, races the clock or lags behind it, and
spreads rumours that live members are down.

Several of them (a `Gang`) do wrong each for itself, and now and then all do the same. Together they claim one
made-up past, for whatever rounds others claim, and serve it. They sign second deltas just after others have
sealed. They link to everybody and serve nothing, or rubbish just before a request would be given up. They
each tell their neighbours of only some members, and leave and come back. Each of them sees all that others
claim, at once.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gossamer.protocol import messages as msg
from gossamer.protocol.blocks import pack_runs
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.history.folds import begin
from gossamer.protocol.limits import (
    CLAIMS_MAX,
    FETCH_OVERDUE_S,
    FETCH_PATIENCE_S,
    ROUND_MAX,
    TOKENS_MAX,
)
from gossamer.protocol.payloads import chunk_hashes, payload_chunk_sizes, payload_length, root_of
from gossamer.protocol.records import HEADER_BYTES, Claim, Delta, DeltaBody, RecordKind, parse_delta, seal
from gossamer.protocol.replica import Replica
from tests.sim.network import End
from tests.sim.node import Node
from tests.sim.trainer import Window
from tests.sim.transfers import LateAnswerError, NoAnswerError

LISTED_AHEAD_MAX = 8
"""How many rounds beyond the clock, as it was when the deed began, others' chunks are listed. A node left
alone with the liar takes the liar's last round for the swarm's, follows, and would close the rounds that the
others are at."""

WATCH_S = 1.0
PAUSE_S = (5.0, 30.0)
LASTS_S = (30.0, 150.0)

Standing = Callable[[], tuple[int, tuple[Claim, ...]]]
"""What a member record states: a last round, and claims."""


def _never(blob: bytes) -> bytes | None:
    raise NoAnswerError


class Liar:
    """Makes one node misbehave."""

    def __init__(self, node: Node, quiet_after: float, dice: str = "liar") -> None:
        self._node = node
        self._rng = node.stage.dice(dice)
        self._quiet_after = quiet_after
        self.deeds: tuple[Callable[[], None], ...] = (
            self.equivocate,
            self.equivocate,
            self._forge,
            self._send_garbage,
            self._replay_damaged,
            self._withhold,
            self._withhold,
            self._withhold_a_part,
            self._keep_it_all,
            self._publish_nonsense,
            self._jump_ahead,
            self._state_another_round,
            self._state_another_round,
            self._spread_rumours,
            self._claim_to_hold,
            self._claim_to_hold,
            self._claim_another_past,
            self._claim_what_few_do,
            self._hold_all_and_send_nothing,
            self._list_others_chunks,
        )
        self.long_deeds: tuple[Callable[[], None], ...] = (
            self._link_to_all_and_send_nothing,
            self._answer_rubbish_late,
            self._tell_each_of_others,
            self._come_and_go,
        )
        """What only the members of a gang do."""
        self._statements: list[Standing] = []
        """What our member record states instead of the truth: the last of these."""
        self._list_from = 0
        """The clock when we last began to list others' chunks."""
        self._listed_up_to = 0
        """The last round for which we have signed a delta that lists others' chunks."""

    def act(self) -> None:
        """Do one wrong thing, and another one soon."""
        node = self._node
        if node.stage.loop.now > self._quiet_after:
            return
        if self.can_act:
            deed = self.deeds[self._rng.randrange(len(self.deeds))]
            node.stage.trace.say(node.stage.loop.now, f"{node.name} does wrong: {deed.__name__}")
            deed()
        node.stage.loop.after(2.0 + 8.0 * self._rng.random(), self.act)

    @property
    def can_act(self) -> bool:
        return self._node.responsive and bool(self._node.links)

    # -- tools

    def _send(self, link: int, message: msg.Message) -> None:
        end = self._node.links.get(link)
        if end is not None:
            end.send(msg.encode(message))

    def _to_some(self, message: msg.Message, share: float = 0.5) -> None:
        for link in list(self._node.links):
            if self._rng.random() < share:
                self._send(link, message)

    def _to_all(self, message: msg.Message) -> None:
        self._to_some(message, share=1.0)

    def _body(self, round_: int, payload: bytes) -> DeltaBody:
        stage = self._node.stage
        base = round_ - len(stage.layout.fragments)
        steps, tokens = 1 + self._rng.randrange(100), 1 + self._rng.randrange(10**6)
        return Window(base, steps, tokens, round_, stage.manifest.outer.codecs[0].name).body(payload)

    def _sign(self, body: DeltaBody) -> Delta:
        stage = self._node.stage
        envelope = seal(self._node.traits.identity, RecordKind.DELTA, stage.manifest.swarm_id, body.pack())
        delta = parse_delta(envelope, stage.layout)
        stage.audit.signed(self._node, delta)
        return delta

    def _signed(self, body: DeltaBody) -> msg.Records:
        return msg.Records(((self._sign(body).data, True),))

    def _payload(self, round_: int) -> bytes:
        fragments, codecs = self._node.stage.layout.fragments, self._node.stage.manifest.outer.codecs
        return self._node.trainer._encode(round_ % len(fragments), codecs[0].name)

    def _nonsense(self, round_: int) -> bytes:
        """Random bytes, one too few for a payload."""
        stage = self._node.stage
        codec = CODECS[stage.manifest.outer.codecs[0].name]
        return self._rng.randbytes(payload_length(codec, stage.layout.of_round(round_)) - 1)

    def _round(self) -> int:
        return max(1, self._node.core.clock + 1 - self._rng.randrange(4))

    def _a_while(self, least: float, more: float) -> float:
        """A time from now, before the liars fall quiet."""
        return min(self._node.stage.loop.now + least + more * self._rng.random(), self._quiet_after)

    def _replace_for_a_while(self, thing: Any, until: float, **methods: Callable[..., Any]) -> None:
        """Have an object behave otherwise."""
        vars(thing).update(methods)

        def restore() -> None:
            for name in methods:
                vars(thing).pop(name, None)

        self._node.stage.loop.at(until, restore)

    # -- deeds: records

    def equivocate(self, round_: int = 0) -> None:
        """Sign two or three deltas for one round; others may have one more of ours."""
        if self._node.fold is None:
            return
        round_ = round_ or self._round()
        for _ in range(2 + self._rng.randrange(2)):
            payload = self._payload(round_)
            self._node.keep(payload, durable=False)
            self._to_some(self._signed(self._body(round_, payload)))

    def _forge(self) -> None:
        """Send a record in another member's name, with a signature of our own."""
        members = self._node.core.roster.members()
        if members and self._node.fold is not None:
            victim = members[self._rng.randrange(len(members))].record
            round_ = self._round()
            body = self._body(round_, self._payload(round_)).pack()
            key = victim.data[1:33]
            own = seal(self._node.traits.identity, RecordKind.DELTA, self._node.stage.manifest.swarm_id, body)
            self._to_some(msg.Records(((own.data[:1] + key + own.data[33:HEADER_BYTES] + body, True),)))

    def _send_garbage(self) -> None:
        links = list(self._node.links)
        end = self._node.links[links[self._rng.randrange(len(links))]]
        end.send(self._rng.randbytes(1 + self._rng.randrange(200)))

    def _replay_damaged(self) -> None:
        """Send a true record with one bit changed."""
        deltas = list(self._node.core.ledger)
        if deltas:
            data = bytearray(deltas[self._rng.randrange(len(deltas))].data)
            data[self._rng.randrange(1, len(data))] ^= 1
            self._to_some(msg.Records(((bytes(data), True),)))

    def _jump_ahead(self) -> None:
        """Sign for a round that cannot have been reached yet."""
        stage = self._node.stage
        round_ = ROUND_MAX - self._rng.randrange(8)
        body = replace(self._body(1, b"x"), round=round_, base=round_ - len(stage.layout.fragments))
        envelope = seal(self._node.traits.identity, RecordKind.DELTA, stage.manifest.swarm_id, body.pack())
        self._to_some(msg.Records(((envelope.data, False),)))

    # -- deeds: payloads

    def _withhold(self) -> None:
        """Publish a record whose payload nobody will ever see; perhaps claim again and again to hold it."""
        round_ = self._round()
        delta = self._sign(self._body(round_, self._nonsense(round_)))
        self._to_some(msg.Records(((delta.data, True),)))
        if self._rng.random() < 0.5:
            self._insist(delta.record_id)

    def _insist(self, record_id: bytes) -> None:
        if self._node.stage.loop.now <= self._quiet_after:
            self._to_all(msg.Have((record_id,)))
            self._node.stage.loop.after(1.0 + self._rng.random(), self._insist, record_id)

    def _withhold_a_part(self) -> None:
        """Publish a record, and lack one chunk of its payload."""
        if self._node.fold is None:
            return
        round_ = self._round()
        payload = self._payload(round_)
        body = self._body(round_, payload)
        self._node.keep(payload, durable=False)
        self._node.disk.drop(body.chunks[self._rng.randrange(len(body.chunks))])
        self._to_some(self._signed(body))

    def _publish_nonsense(self) -> None:
        """Publish a payload with the right hash that does not decode, stating as many tokens as possible, and
        all of the data."""
        round_ = self._round()
        payload = self._nonsense(round_)
        self._node.keep(payload, durable=False)
        everything = pack_runs([(0, self._node.stage.manifest.data.blocks)])
        body = replace(self._body(round_, payload), tokens=TOKENS_MAX, blocks=everything)
        self._to_some(self._signed(body))

    def _keep_it_all(self) -> None:
        """For a while decline every chunk, or do not react when a peer asks us to put one."""
        until = self._node.stage.loop.now + 5.0 + 25.0 * self._rng.random()
        if self._rng.random() < 0.5:
            self._replace_for_a_while(self._node.transfers, until, read=lambda blob: None)
        else:
            self._replace_for_a_while(self._node.transfers, until, asked=lambda end, blob: None)

    def _hold_all_and_send_nothing(self) -> None:
        """Claim to hold everybody's payloads as soon as they are published, and never answer."""
        self._claim_all(self._send_nothing())

    def _send_nothing(self) -> float:
        """Answer no request for a chunk, for a while; returns until when."""
        until = self._a_while(30.0, 60.0)
        transfers = self._node.transfers
        self._replace_for_a_while(transfers, until, asked=lambda end, blob: None, give=_never)
        return until

    def _claim_all(self, until: float) -> None:
        if self._node.stage.loop.now < until:
            if ids := tuple(delta.record_id for delta in self._node.core.ledger)[-30:]:
                self._to_all(msg.Have(ids))
            self._node.stage.loop.after(0.2 + 0.2 * self._rng.random(), self._claim_all, until)

    def _claim_to_hold(self) -> None:
        """Claim payloads that we may not have, one of a record that does not exist, and single chunks of
        others, old, new and made up, some at impossible places."""
        ids = [delta.record_id for delta in self._node.core.ledger]
        self._to_some(msg.Have((*ids[-3:], self._rng.randbytes(32))))
        for record_id in (*ids[-6:], self._rng.randbytes(32)):
            places = {self._rng.randrange(16) for _ in range(self._rng.randrange(8))}
            self._to_some(msg.HaveChunks(record_id, tuple(sorted(places))))

    def _list_others_chunks(self) -> None:
        """Sign deltas that list the chunks of others' new deltas with other sizes, and never answer."""
        known = {delta.record_id for delta in self._node.core.ledger}
        self._list_from = self._node.core.clock
        self._list_new_chunks(known, self._send_nothing())

    def _list_new_chunks(self, known: set[bytes], until: float) -> None:
        node = self._node
        if node.stage.loop.now < until:
            for delta in list(node.core.ledger):
                if delta.record_id not in known and delta.author != node.traits.identity.node_id:
                    self._list_chunks_of(delta.body)
                known.add(delta.record_id)
            node.stage.loop.after(0.05, self._list_new_chunks, known, until)

    def _list_chunks_of(self, body: DeltaBody) -> None:
        """List them as two more payloads, each a little shorter, of rounds that are still to come."""
        clock, fragments = self._node.core.clock, len(self._node.stage.layout.fragments)
        for less in (1, 2):
            round_ = max(self._listed_up_to + 1, clock + 2)
            round_ += (body.round - round_) % fragments
            size = body.payload_bytes - less
            is_near = round_ <= self._list_from + LISTED_AHEAD_MAX
            if is_near and size > 0 and len(payload_chunk_sizes(size)) == len(body.chunks):
                self._listed_up_to = round_
                lie = replace(self._body(round_, b"x"), payload_bytes=size, chunks=body.chunks)
                self._to_all(self._signed(lie))

    def _link_to_all_and_send_nothing(self) -> None:
        node = self._node
        for member in node.core.roster.members():
            for address in member.record.body.addresses:
                if node.core.links.to(member.record.node_id) is None:
                    node.stage.net.dial(node, address)
        self._claim_all(self._send_nothing())

    def _answer_rubbish_late(self) -> None:
        """Send wrong bytes for every chunk, just before another node is asked or the request is given up."""
        transfers = self._node.transfers

        def give(blob: bytes) -> bytes | None:
            patience = FETCH_OVERDUE_S if self._rng.random() < 0.5 else FETCH_PATIENCE_S
            raise LateAnswerError(patience - self._rng.random(), self._rng.randbytes(64))

        def asked(end: End | None, blob: bytes) -> None:
            seconds = FETCH_OVERDUE_S - self._rng.random()
            self._node.soon(seconds, type(transfers).asked, transfers, end, blob)

        def read(blob: bytes) -> bytes:
            return self._rng.randbytes(64)

        self._replace_for_a_while(transfers, self._a_while(30.0, 60.0), give=give, asked=asked, read=read)

    # -- deeds: members, and the past

    def _spread_rumours(self) -> None:
        """Suspect live members."""
        for member in self._node.core.roster.members():
            if self._rng.random() < 0.3:
                self._to_some(msg.Suspect(member.record.node_id, *member.record.body.age))

    def _state_another_round(self) -> None:
        """Train on, but state for a while that we are at round 1, or far ahead."""
        core, ahead = self._node.core, 1 + self._rng.randrange(10**6)
        lags, until = self._rng.random() < 0.5, self._a_while(20.0, 60.0)
        self.state(lambda: (1 if lags else core.own_last + ahead, core.sealing.claims), until)

    def _claim_another_past(self) -> None:
        """Claim a snapshot with far more tokens than the swarm's, and newer ones too."""
        claims = self._node.core.sealing.claims
        if claims:
            step = self._node.stage.manifest.history.snapshot_every
            self._claim([claims[0].round + ahead * step for ahead in (2, 1, 0)])

    def _claim_what_few_do(self) -> None:
        """Do the same only for rounds that hardly anybody else claims just now."""
        members = self._node.core.roster.live()
        newest = Counter(claim.round for member in members for claim in member.record.body.claims[:1])
        rounds = sorted((round_ for round_ in newest if round_), key=lambda round_: (newest[round_], round_))
        self._claim(sorted(rounds[:3], reverse=True))

    def _claim(self, rounds: list[int]) -> None:
        """Claim a made-up past of these rounds, newest first, for a while, and serve it."""
        node = self._node
        if node.fold is not None and rounds:
            root, digest = _made_up_past(node.fold.phi, [node]), self._rng.randbytes(32)
            claims = tuple(Claim(round_, 2**59, digest, root) for round_ in rounds)
            self.state(lambda: (node.core.own_last, claims), self._a_while(20.0, 30.0))

    def state(self, standing: Standing, until: float) -> None:
        """Have our member record state a last round and claims that may not be ours, until then; of several
        such statements, the last one."""
        core = self._node.core
        self._statements.append(standing)
        self._node.stage.loop.at(until, self._statements.remove, standing)

        def state_our_own() -> None:
            if self._statements:
                core.presence.round, core.presence.claims = self._statements[-1]()
            else:
                Replica._state_our_own(core)

        core._state_our_own = state_our_own  # type: ignore[method-assign]
        state_our_own()

    def _tell_each_of_others(self) -> None:
        """Tell others of about half of the members only, for a while."""
        known = [member.record.node_id for member in self._node.core.roster.members()]
        self.tell_of({node_id for node_id in known if self._rng.random() < 0.5}, self._a_while(20.0, 60.0))

    def tell_of(self, known: set[bytes], until: float) -> None:
        """Tell others of these members only, until then."""
        node, presence = self._node, self._node.core.presence

        def tell() -> None:
            for node_id in presence._news.keys() - known - {node.traits.identity.node_id}:
                del presence._news[node_id]
            type(presence)._send_news(presence)

        def exchange(link: int, _: object) -> None:
            others = [m.record.data for m in node.core.roster.members() if m.record.node_id in known]
            presence._send([presence.data, *others], [link])

        self._replace_for_a_while(presence, until, _send_news=tell, exchange=exchange)

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


def _made_up_past(phi: Ints, nodes: Sequence[Node]) -> bytes:
    """Have nodes serve a snapshot that never was. Returns its root."""
    data = (phi + 1).tobytes()
    hashes = chunk_hashes(data) * 3  # as if its sums were the same
    manifest = nodes[0].stage.manifest
    index = [*hashes, begin(manifest).pack(manifest)]
    root = root_of(index)
    for node in nodes:
        node.disk.put(hashes[0], data, node.stage.loop.now)
        node.disk.put(root, b"".join(index), node.stage.loop.now)
    return root


class Gang:
    """Makes its members do the same thing at the same time."""

    def __init__(self, nodes: Sequence[Node], others: Callable[[], list[Node]], quiet_after: float) -> None:
        """`others`: returns the honest nodes that run."""
        self._loop = nodes[0].stage.loop
        self._rng: random.Random = nodes[0].stage.dice("gang")
        self._trace = nodes[0].stage.trace
        self._others = others
        self._quiet_after = quiet_after
        self._members = [Liar(node, quiet_after, dice=f"liar {node.index}") for node in nodes]
        for member in self._members:
            member.deeds = (*member.deeds, *member.long_deeds)
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
        names = [deed.__name__ for deed in (*member.long_deeds, *member.deeds)]
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
                member.state(partial(self._standing, node), self._until)
                member.tell_of({other.traits.identity.node_id for other in self._nodes}, self._until)

    def _standing(self, node: Node) -> tuple[int, tuple[Claim, ...]]:
        return node.core.own_last + self._ahead, self._claims(node)

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
            root = _made_up_past(node.fold.phi, self._nodes)
            self._lies[round_] = Claim(round_, 2**59, self._rng.randbytes(32), root)
        return self._lies[round_]

    # -- equivocation

    def _equivocate_after_seals(self) -> None:
        """Whenever a node has sealed, one of us signs again for the last round of that snapshot."""
        if self._loop.now >= self._until:
            return
        sealed = max((claim.round for n in self._others() for claim in n.core.sealing.claims), default=0)
        member = self._members[self._rng.randrange(len(self._members))]
        if sealed > self._sealed and member.can_act:
            member.equivocate(sealed)
        self._sealed = max(sealed, self._sealed)
        self._loop.after(WATCH_S, self._equivocate_after_seals)
