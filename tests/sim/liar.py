"""A Byzantine member: a node like the others that now and then does one of many wrong things.

It has a key and is admitted, so its signatures verify. It equivocates (two or three records for one round,
to different peers), forges others' records and sends garbage. It withholds payloads or parts of them, or
publishes payloads that do not decode. It claims to hold payloads that it has not, once or all the time. It
does not send what it has: it claims to hold everything, or lists others' chunks as its own, and never
answers. It signs for rounds of the far future, claims a made-up past, races the clock or lags behind it, and
spreads rumours that live members are down.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from gossamer.protocol import messages as msg
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.limits import ROUND_MAX, TOKENS_MAX
from gossamer.protocol.payloads import chunk_hashes, payload_chunk_sizes, payload_length, root_of
from gossamer.protocol.records import HEADER_BYTES, Claim, Delta, DeltaBody, RecordKind, parse_delta, seal
from gossamer.protocol.replica import Replica
from tests.sim.exchange import NoAnswerError
from tests.sim.node import Node
from tests.sim.trainer import Window
from tests.sim.transfers import Transfers

LISTED_AHEAD_MAX = 8
"""How many rounds beyond the clock, as it was when the deed began, others' chunks are listed. A node left
alone with the liar takes the liar's last round for the swarm's, follows, and would close the rounds that the
others are at."""


def _never(blob: bytes) -> bytes | None:
    raise NoAnswerError


Standing = Callable[[], tuple[int, tuple[Claim, ...]]]
"""What a member record states: a last round, and claims."""


class Liar:
    """Makes one node misbehave."""

    def __init__(self, node: Node, quiet_after: float, dice: str = "liar") -> None:
        self._node = node
        self._rng = node.stage.dice(dice)
        self._quiet_after = quiet_after
        self.deeds: tuple[Callable[[], None], ...] = (
            self._equivocate,
            self._equivocate,
            self._forge,
            self._send_garbage,
            self._replay_damaged,
            self._withhold,
            self._withhold_a_part,
            self._keep_it_all,
            self._publish_nonsense,
            self._jump_ahead,
            self._race_the_clock,
            self._spread_rumours,
            self._claim_to_hold,
            self._claim_parts,
            self._claim_another_past,
            self._claim_what_few_do,
            self._lag_behind,
            self._withhold_and_insist,
            self._hold_all_and_send_nothing,
            self._list_others_chunks,
        )
        self._list_from = 0
        """The clock when we last began to list others' chunks."""
        self._listed_up_to = 0
        """The last round for which we have signed a delta that lists others' chunks."""

    def act(self) -> None:
        """Do one wrong thing, and another one soon."""
        node = self._node
        if node.stage.loop.now > self._quiet_after:
            return
        if node.responsive and node.links:
            deed = self.deeds[self._rng.randrange(len(self.deeds))]
            node.stage.trace.say(node.stage.loop.now, f"{node.name} does wrong: {deed.__name__[1:]}")
            deed()
        node.stage.loop.after(2.0 + 8.0 * self._rng.random(), self.act)

    # -- tools

    def _send(self, link: int, data: bytes) -> None:
        end = self._node.links.get(link)
        if end is not None:
            end.send(data)

    def _to_some(self, message: msg.Message) -> None:
        for link in list(self._node.links):
            if self._rng.random() < 0.5:
                self._send(link, msg.encode(message))

    def _body(self, round_: int, payload: bytes) -> DeltaBody:
        stage = self._node.stage
        fragments = len(stage.layout.fragments)
        window = Window(
            round_ - fragments, 1 + self._rng.randrange(100), 1 + self._rng.randrange(10**6), round_
        )
        return window.body(stage.manifest, payload)

    def _sign(self, body: DeltaBody) -> Delta:
        stage = self._node.stage
        envelope = seal(self._node.traits.identity, RecordKind.DELTA, stage.manifest.swarm_id, body.pack())
        delta = parse_delta(envelope, stage.layout)
        stage.audit.signed(self._node, delta)
        return delta

    def _payload(self, round_: int) -> bytes:
        return self._node.trainer._encode(round_ % len(self._node.stage.layout.fragments))

    def _nonsense(self, round_: int) -> bytes:
        """Random bytes, one too few for a payload."""
        stage = self._node.stage
        codec = CODECS[stage.manifest.outer.codec]
        return self._rng.randbytes(payload_length(codec, stage.layout.of_round(round_)) - 1)

    def _round(self) -> int:
        clock = self._node.core.clock
        return max(1, clock + 1 - self._rng.randrange(4))

    # -- deeds

    def _equivocate(self) -> None:
        if self._node.fold is None:
            return
        round_ = self._round()
        for _ in range(2 + self._rng.randrange(2)):
            payload = self._payload(round_)
            self._node.keep(payload, durable=False)
            self._to_some(msg.Records(((self._sign(self._body(round_, payload)).data, True),)))

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
        size = 1 + self._rng.randrange(200)
        self._send(links[self._rng.randrange(len(links))], self._rng.randbytes(size))

    def _replay_damaged(self) -> None:
        """Send a true record with one bit changed."""
        deltas = list(self._node.core.ledger)
        if deltas:
            data = bytearray(deltas[self._rng.randrange(len(deltas))].data)
            data[self._rng.randrange(1, len(data))] ^= 1
            self._to_some(msg.Records(((bytes(data), True),)))

    def _withhold(self) -> None:
        """Publish a record whose payload nobody will ever see."""
        round_ = self._round()
        self._to_some(msg.Records(((self._sign(self._body(round_, self._nonsense(round_))).data, True),)))

    def _withhold_and_insist(self) -> None:
        """Publish a record, claim again and again to hold its payload, and never send it."""
        round_ = self._round()
        delta = self._sign(self._body(round_, self._nonsense(round_)))
        self._to_some(msg.Records(((delta.data, True),)))
        self._insist(delta.record_id)

    def _insist(self, record_id: bytes) -> None:
        node = self._node
        if node.stage.loop.now > self._quiet_after:
            return
        for link in list(node.links):
            self._send(link, msg.encode(msg.Have((record_id,))))
        node.stage.loop.after(1.0 + self._rng.random(), self._insist, record_id)

    def _withhold_a_part(self) -> None:
        """Publish a record, and lack one chunk of its payload."""
        if self._node.fold is None:
            return
        round_ = self._round()
        payload = self._payload(round_)
        body = self._body(round_, payload)
        self._node.keep(payload, durable=False)
        self._node.disk.drop(body.chunks[self._rng.randrange(len(body.chunks))])
        self._to_some(msg.Records(((self._sign(body).data, True),)))

    def _keep_it_all(self) -> None:
        """For a while decline every chunk, or do not react when a peer asks us to put one."""
        transfers = self._node.transfers
        if self._rng.random() < 0.5:
            transfers.read = lambda blob: None  # type: ignore[method-assign]
        else:
            transfers.asked = lambda end, blob: None  # type: ignore[method-assign]
        seconds = 5.0 + 25.0 * self._rng.random()
        self._node.stage.loop.after(seconds, self._give_again, transfers)

    @staticmethod
    def _give_again(transfers: Transfers) -> None:
        vars(transfers).pop("read", None)
        vars(transfers).pop("asked", None)
        vars(transfers).pop("give", None)

    def _hold_all_and_send_nothing(self) -> None:
        """Claim to hold everybody's payloads as soon as they are published, and never answer."""
        self._claim_all(self._send_nothing())

    def _send_nothing(self) -> float:
        """Answer no request for a chunk, for a while; returns until when."""
        transfers = self._node.transfers
        transfers.asked = lambda end, blob: None  # type: ignore[method-assign]
        transfers.give = _never  # type: ignore[method-assign]
        loop = self._node.stage.loop
        until = min(loop.now + 30.0 + 60.0 * self._rng.random(), self._quiet_after)
        loop.at(until, self._give_again, transfers)
        return until

    def _claim_all(self, until: float) -> None:
        node = self._node
        if node.stage.loop.now < until:
            ids = tuple(delta.record_id for delta in node.core.ledger)[-30:]
            for link in list(node.links) if ids else ():
                self._send(link, msg.encode(msg.Have(ids)))
            node.stage.loop.after(0.2 + 0.2 * self._rng.random(), self._claim_all, until)

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
        node = self._node
        clock, fragments = node.core.clock, len(node.stage.layout.fragments)
        for less in (1, 2):
            round_ = max(self._listed_up_to + 1, clock + 2)
            round_ += (body.round - round_) % fragments
            size = body.payload_bytes - less
            is_near = round_ <= self._list_from + LISTED_AHEAD_MAX
            if is_near and size > 0 and len(payload_chunk_sizes(size)) == len(body.chunks):
                self._listed_up_to = round_
                lie = replace(self._body(round_, b"x"), payload_bytes=size, chunks=body.chunks)
                record = msg.encode(msg.Records(((self._sign(lie).data, True),)))
                for link in list(node.links):
                    self._send(link, record)

    def _publish_nonsense(self) -> None:
        """Publish a payload with the right hash that does not decode, stating as many tokens as possible."""
        round_ = self._round()
        payload = self._nonsense(round_)
        self._node.keep(payload, durable=False)
        body = replace(self._body(round_, payload), tokens=TOKENS_MAX)
        self._to_some(msg.Records(((self._sign(body).data, True),)))

    def _jump_ahead(self) -> None:
        """Sign for a round that cannot have been reached yet."""
        stage = self._node.stage
        round_ = ROUND_MAX - self._rng.randrange(8)
        body = replace(self._body(1, b"x"), round=round_, base=round_ - len(stage.layout.fragments))
        envelope = seal(self._node.traits.identity, RecordKind.DELTA, stage.manifest.swarm_id, body.pack())
        self._to_some(msg.Records(((envelope.data, False),)))

    def _race_the_clock(self) -> None:
        """Send a row that claims to be rounds ahead."""
        row = self._node.core.own_record
        claim = replace(row, heartbeat=row.heartbeat + 1, round=row.round + 1 + self._rng.randrange(10**6))
        identity, swarm_id = self._node.traits.identity, self._node.stage.manifest.swarm_id
        self._to_some(msg.Records(((seal(identity, RecordKind.MEMBER, swarm_id, claim.pack()).data, False),)))

    def _lag_behind(self) -> None:
        """Train on, but for a while state round 1 in our row."""
        node = self._node
        self._state(node.core, lambda: (1, node.core.sealing.claims))
        node.stage.loop.after(20.0 + 60.0 * self._rng.random(), self._tell_the_truth, node.core)

    def _spread_rumours(self) -> None:
        """Suspect live members."""
        for member in self._node.core.roster.members():
            if self._rng.random() < 0.3:
                self._to_some(msg.Suspect(member.record.node_id, *member.record.body.age))

    def _claim_to_hold(self) -> None:
        """Claim to hold payloads that we may not have, one of a record that does not exist."""
        ids = [delta.record_id for delta in self._node.core.ledger][-3:]
        self._to_some(msg.Have((*ids, self._rng.randbytes(32))))

    def _claim_parts(self) -> None:
        """Claim chunks that we may not have, of payloads old, new and made up, some at impossible places."""
        ids = [delta.record_id for delta in self._node.core.ledger][-6:]
        for record_id in (*ids, self._rng.randbytes(32)):
            places = {self._rng.randrange(16) for _ in range(self._rng.randrange(8))}
            self._to_some(msg.HaveChunks(record_id, tuple(sorted(places))))

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
        if node.fold is None or not rounds:
            return
        data = (node.fold.phi + 1).tobytes()
        hashes = chunk_hashes(data)
        root = root_of(hashes)
        node.disk.put(hashes[0], data, node.stage.loop.now)
        node.disk.put(root, b"".join(hashes), node.stage.loop.now)
        digest = self._rng.randbytes(32)
        claims = tuple(Claim(round_, 2**59, digest, root) for round_ in rounds)
        self._state(node.core, lambda: (node.core.own_last, claims))
        node.stage.loop.after(20.0 + 30.0 * self._rng.random(), self._tell_the_truth, node.core)

    def _tell_the_truth(self, core: Replica) -> None:
        self._state(core, lambda: (core.own_last, core.sealing.claims))

    def _state(self, core: Replica, standing: Standing) -> None:
        """Have our member record state a last round and claims that may not be ours."""

        def state() -> None:
            core.presence.round, core.presence.claims = standing()

        core._state_our_own = state  # type: ignore[method-assign]
        state()
