"""One core and its honest adapter, besieged by hostile peers: any event, in any order, at any time.

The input is a list of moves of six bytes each, which determine all that a move does. Peers may sign anything
with their own keys, and send any bytes. Local events are those that a real adapter could send. After every
event the invariants of `Siege._check_effect` and `Siege._check_tables` must hold.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from random import Random
from typing import Any
from unittest import mock

from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol import limits
from gossamer.protocol import messages as msg
from gossamer.protocol.errors import PeerError
from gossamer.protocol.history.claims import genesis_claim
from gossamer.protocol.membership.members import NodeInfo
from gossamer.protocol.records import (
    NO_RECORD,
    Claim,
    DeltaBody,
    Envelope,
    MemberRecordBody,
    RecordKind,
    open_envelope,
    seal,
)
from gossamer.protocol.replica import Replica
from gossamer.protocol.wire import is_printable, pack, unpack
from tests.fuzz.decoders import mutate_record, record_seeds
from tests.fuzz.forge import blobs_from, forge
from tests.fuzz.mutate import INTS, mutate_bytes, mutate_packed, mutate_value
from tests.fuzz.target import Target
from tests.protocol import builders

MOVE_BYTES = 6
MOVES_MAX = 400
OURS = builders.identity(0)
HOSTILE = [builders.identity(number) for number in range(1, 25)]
ADDRESSES = ("host1:7700", "host2:7700", "[::1]:1", "10.0.0.1:65535")
WAKES = 12

TIGHT = {
    "MEMBERS_MAX": 6,
    "LINKS_MAX": 5,
    "LINKS_WANTED": 3,
    "LINKS_MIN": 2,
    "RECORDS_PER_MESSAGE_MAX": 3,
    "IDS_PER_MESSAGE_MAX": 6,
    "IDS_PER_ROUND_MAX": 12,
    "COMPARED_PARENTS_MAX": 3,
    "FETCHES_MAX": 4,
    "FETCHES_PER_LINK_MAX": 2,
    "UNUSABLE_MAX": 2,
}
"""Bounds so low that a few moves reach them."""

BOUNDS: dict[str, Callable[[], int]] = {
    "roster._members": lambda: limits.MEMBERS_MAX,
    "links._links": lambda: limits.LINKS_MAX,
    "links._dialling": lambda: limits.DIALS_AT_ONCE_MAX,
    "anti_entropy._exchanges": lambda: limits.LINKS_MAX,
    "membership._links": lambda: limits.LINKS_MAX,
    "membership._vouching": lambda: limits.VOUCHES_PER_LINK_MAX * limits.LINKS_MAX,
    "fetcher._links": lambda: limits.LINKS_MAX,
    "fetcher.requests.current": lambda: limits.FETCHES_MAX + limits.GUESSES_MAX,
    "fetcher.requests.late": lambda: limits.FETCHES_PER_LINK_MAX * limits.LINKS_MAX,
    "fetcher.requests.load": lambda: limits.LINKS_MAX,
    "sealing.claims": lambda: limits.CLAIMS_MAX,
    "sealing._forks._yields": lambda: limits.FORK_DOUBLINGS_MAX,
    "sealing._peers._unusable": lambda: limits.UNUSABLE_MAX,
}
"""Tables of the core's state machines that have a bound. Others may grow only with the number of events."""


@contextmanager
def bounds(tight: bool) -> Iterator[None]:
    """The real limits, or limits that a few moves reach."""
    with ExitStack() as stack:
        for name, value in TIGHT.items() if tight else ():
            stack.enter_context(mock.patch.object(limits, name, value))
        yield


class Siege:
    """The state of one run."""

    def __init__(self, seed: int) -> None:
        self.now = 100.0
        self.chunks: dict[bytes, int] = {}
        self.core = Replica(
            identity=OURS,
            manifest=builders.SMALL,
            info=NodeInfo(name="n", trains=True, incarnation=1, bootstrap=ADDRESSES[: seed % 3]),
            fits=lambda blob, size: self.chunks[blob] == size if blob in self.chunks else None,
            unix_offset_s=builders.CREATED + 3600.0,
            rng=Random(seed),
        )
        self.counts: Counter[str] = Counter()
        self.links: dict[int, bytes] = {}
        """Links as the adapter sees them: one that the core hung up lives until its LinkDown."""
        self.inbound: set[int] = set()
        self.numbers = 0
        self.dials: deque[fx.Dial] = deque(maxlen=16)
        self.duties: deque[ev.Event] = deque()
        """Events that the adapter still owes the core."""
        self.fetched: deque[Claim] = deque(maxlen=4)
        """Snapshots that the core asked for."""
        self.wanted: deque[tuple[int, bytes]] = deque(maxlen=64)
        self.sent: deque[bytes] = deque(maxlen=32)
        """Messages that the core sent: hostile peers reflect and repeat them."""
        self.known: deque[bytes] = deque([bytes(32), OURS.node_id], maxlen=64)
        """Ids that mean something to the core."""
        self.received: deque[bytes] = deque(maxlen=16)
        self.records: deque[bytes] = deque([self.core.presence.data], maxlen=32)
        self._carry_out(self.core.announce(("me:1",)))

    # -- events in, effects out

    def handle(self, event: ev.Event) -> None:
        self.counts["events"] += 1
        effects = self.core.handle(event, self.now)
        for effect in effects:
            self._check_effect(effect)
        if isinstance(event, ev.LinkDown):
            self.links.pop(event.link, None)
        self._carry_out(effects)
        self._check_tables()
        assert not math.isnan(self.core.next_wake())

    def _carry_out(self, effects: list[fx.Effect]) -> None:
        for effect in effects:
            match effect:
                case fx.Send():
                    self.sent.append(msg.encode(effect.message))
                case fx.Dial():
                    self.dials.append(effect)
                case fx.Get():
                    self.wanted.append((effect.link, effect.blob))
                case fx.Store():
                    self.known.append(effect.delta.record_id)
                    self.known.extend(effect.delta.body.chunks[:2])
                    if effect.own:
                        self.duties.append(ev.Stored(effect.delta))
                case fx.Seal():
                    claim = Claim(effect.round, 1, bytes(32), bytes([effect.round % 256]) * 32)
                    self.duties.append(ev.Sealed((claim, *self.core.sealing.claims)[: limits.CLAIMS_MAX]))
                case fx.Prefetch():
                    self.fetched.append(effect.claim)
                case fx.Adopt():
                    self.fetched.append(effect.claim)
                    self.duties.append(ev.Adopted(effect.claim))
            if isinstance(effect, fx.Send) and isinstance(effect.message, msg.Want):
                self.wanted.append((effect.link, effect.message.blob))

    # -- invariants

    def _check_effect(self, effect: fx.Effect) -> None:
        assert isinstance(effect, fx.Effect), effect
        match effect:
            case fx.Send():
                assert effect.link in self.links, f"to link {effect.link}, which is not up: {effect.message}"
                data = msg.encode(effect.message)
                assert msg.decode(data) == effect.message, "honest peers would not take this message"
            case fx.Hangup() | fx.Put():
                assert effect.link in self.links
            case fx.Get():
                assert effect.link in self.links
                assert 0 <= effect.size <= limits.CHUNK_BYTES_MAX
            case fx.Store():
                assert open_envelope(effect.delta.data, self.core.swarm_id).author == effect.delta.author
            case fx.Dial():
                assert is_printable(effect.address)
        if isinstance(effect, fx.Blame | fx.Hangup):
            assert is_printable(effect.reason)
            assert len(effect.reason) < 1000
        if isinstance(effect, fx.Notice):
            assert is_printable(effect.text)
            assert len(effect.text) < 1000

    def _check_tables(self) -> None:
        core = self.core
        for name, size in tables(core):
            # An event brings a bounded number of entries. A table with its own bound stops there.
            most = BOUNDS[name]() if name in BOUNDS else 64 + 40 * self.counts["events"]
            assert size <= most, f"{name} holds {size}, over {most}"
        for exchange in core.anti_entropy._exchanges.values():
            assert len(exchange.awaited) <= limits.IDS_PER_MESSAGE_MAX
            assert len(exchange.given) <= limits.IDS_PER_MESSAGE_MAX
        requests = core.fetcher.requests
        load = Counter(request.link for request in requests)
        assert all(count <= limits.FETCHES_PER_LINK_MAX for count in load.values())
        assert set(load) <= {link.number for link in core.links.all()}
        assert requests.load == {link: load[link] for link in core.fetcher._links}
        linked = {link.number for link in core.links.all()}
        assert linked <= set(self.links)
        assert linked == set(core.fetcher._links) == set(core.membership._links)
        # We are linked to each node only once, but for a link that its peer has just replaced, and never to
        # ourselves.
        replaced = {number for number, _ in core._replaced.values()}
        nodes = [link.node_id for link in core.links.all() if link.number not in replaced]
        assert len(set(nodes)) == len(nodes)
        assert OURS.node_id not in nodes

    # -- hostile values

    def _pool(self, dice: Random) -> list[bytes]:
        """The byte strings that one message is made from: ids of known things, or records."""
        if dice.randrange(6) == 0:
            return list(self.records)
        return [*self.known, *(key.node_id for key in HOSTILE[:6]), *([OURS.node_id] * 16)]

    def _record(self, dice: Random) -> bytes:
        """A record of any kind, signed by its hostile author, and valid in all but a field or two."""
        author = dice.choice(HOSTILE)
        choice = dice.randrange(8)
        if choice == 0:
            body = mutate_record(dice.choice(record_seeds_once()), dice)
            return self._sealed(author, RecordKind(body[0]), body[1:], dice)
        if choice < 4:
            return self._sealed(author, RecordKind.MEMBER, self._row(dice).pack(), dice)
        return self._sealed(author, RecordKind.DELTA, self._delta(dice).pack(), dice)

    def _sealed(self, author: Any, kind: RecordKind, body: bytes, dice: Random) -> bytes:
        if dice.randrange(10) == 0:
            body = mutate_packed(body, dice)
        data = seal(author, kind, self.core.swarm_id, body[:60_000] or b"\xc0").data
        self.records.append(data)
        return mutate_bytes(data, dice) if dice.randrange(20) == 0 else data

    def _row(self, dice: Random) -> MemberRecordBody:
        root = bytes([dice.randrange(4)]) * 32
        claim = Claim(
            dice.choice((0, 16, 32, limits.ROUND_MAX)), dice.choice((0, 1, 2**63 - 1)), bytes(32), root
        )
        many = tuple(claim._replace(digest=bytes([number]) * 32) for number in range(limits.CLAIMS_MAX))
        return replace(
            builders.row(HOSTILE[0]).body,
            incarnation=dice.choice((0, 1, 2, 2**53)),
            heartbeat=dice.choice((1, dice.randrange(100), 2**53)),
            leaving=dice.randrange(6) == 0,
            addresses=tuple(dice.choice(ADDRESSES) for _ in range(dice.choice((0, 1, 8)))),
            round=dice.choice((0, 1, 50, limits.ROUND_MAX)),
            claims=dice.choice(((), (claim,), many, (genesis_claim(bytes(32)),))),
        )

    def _delta(self, dice: Random) -> DeltaBody:
        round_ = dice.choice((1, 2, 3, dice.randrange(1, 200), 72_000, 10**6, limits.ROUND_MAX))
        size = dice.choice((1, 100, 400))
        return replace(
            builders.body_of(dice.randbytes(4), "int8", round_, 2),
            payload_bytes=size,
            tokens=dice.choice((1, limits.TOKENS_MAX)),
            chunks=(dice.choice((bytes(32), self.known[-1], dice.randbytes(32))),),
            previous=dice.choice((NO_RECORD, self.known[-1])),
        )

    def _link(self, dice: Random) -> int | None:
        return dice.choice(sorted(self.links)) if self.links else None

    def _say(self, dice: Random, data: bytes) -> None:
        link = self._link(dice)
        if link is None:
            return
        self.received.append(data)
        self.counts["messages"] += 1
        try:
            message = msg.decode(data)
        except PeerError:
            pass
        else:
            self.counts["messages decoded"] += 1
            if isinstance(message, msg.Records):
                self._count_records(message)
        self.handle(ev.Received(link, data))

    def _count_records(self, message: msg.Records) -> None:
        for data, _ in message.entries:
            self.counts["records"] += 1
            try:
                envelope: Envelope = open_envelope(data, self.core.swarm_id)
            except PeerError:
                continue
            self.counts["records signed"] += 1
            self.known.append(envelope.record_id)

    # -- moves

    def up(self, dice: Random) -> None:
        self.numbers += 1
        node_id = dice.choice(HOSTILE).node_id if dice.randrange(30) else OURS.node_id
        self.links[self.numbers] = node_id
        outbound = dice.random() < 0.5
        self.handle(ev.LinkUp(self.numbers, node_id, outbound, dice.choice(ADDRESSES) if outbound else None))

    def down(self, dice: Random) -> None:
        link = self._link(dice)
        if link is not None:
            self.handle(ev.LinkDown(link))

    def dialled(self, dice: Random) -> None:
        if not self.dials:
            return
        dial = self.dials.popleft()
        if dice.randrange(2):
            self.handle(ev.DialFailed(dial.address))
            return
        self.numbers += 1
        node_id = dial.node_id or dice.choice(HOSTILE).node_id
        self.links[self.numbers] = node_id
        self.handle(ev.LinkUp(self.numbers, node_id, True, dial.address))

    def garbage(self, dice: Random) -> None:
        self._say(dice, dice.randbytes(dice.choice((0, 1, 5, 40, 3000))))

    def speak(self, dice: Random) -> None:
        """Send a message of any kind in which every field is hostile."""
        kind = dice.choice(list(msg.KINDS))
        try:
            self._say(dice, msg.encode(forge(kind, dice, blobs_from(self._pool(dice)))))
        except OverflowError:
            self.counts["not packable"] += 1

    def records_(self, dice: Random) -> None:
        count = dice.choice((1, 1, 2, 3, limits.RECORDS_PER_MESSAGE_MAX))
        entries = tuple((self._record(dice), dice.random() < 0.5) for _ in range(count))
        self._say(dice, msg.encode(msg.Records(entries)))

    def compare(self, dice: Random) -> None:
        """Send part of an exchange of ledgers, about rounds and records that exist."""
        rounds = [*self.core.ledger.rounds(), self.core.ledger.floor, 1, limits.ROUND_MAX]
        level = dice.choice((0, 0, 0, 1, self.core.ledger.digests.top + 1, limits.RANGE_LEVEL_MAX))
        chosen = [dice.choice(rounds) for _ in range(dice.choice((0, 1, 3, 12)))]
        some = [dice.choice(list(self.known))[:32] for _ in range(dice.choice((0, 1, 3, 12)))]
        ranges = tuple(
            (round_ >> 4 * level, dice.choice((bytes(32), dice.randbytes(32)))) for round_ in chosen
        )
        above = dice.choice((0, 0, *rounds))
        message = dice.choice(
            (
                msg.Digest(level, ranges, dice.random() < 0.5, above),
                msg.RecordIds(tuple((round_, tuple(some)) for round_ in chosen)),
                msg.GetRecords(tuple(some)),
            )
        )
        self._say(dice, msg.encode(message))

    def reflect(self, dice: Random) -> None:
        """Send the core one of its own messages, unchanged or changed in one place."""
        if self.sent:
            data = dice.choice(list(self.sent))
            if dice.randrange(2):
                value = mutate_value(unpack(data, limits.MESSAGE_BYTES_MAX), dice)
                try:
                    data = pack(value)
                except (OverflowError, ValueError):
                    data = mutate_bytes(data, dice)
            self._say(dice, data)

    def repeat(self, dice: Random) -> None:
        if self.received:
            self._say(dice, dice.choice(list(self.received)))

    def pass_time(self, dice: Random) -> None:
        self.now += dice.choice((1e-9, 0.01, 0.5, 1.0, 4.0, 13.0, 31.0, 100.0, 1e5))

    def wake(self, dice: Random) -> None:
        """Wake the core as a timer does. After each Wake the next must lie ahead, or it would spin."""
        for _ in range(dice.choice((1, 1, WAKES))):
            due = self.core.next_wake()
            assert due < math.inf
            self.now = max(self.now, due)
            self.handle(ev.Wake())
            assert self.core.next_wake() > self.now

    def duty(self, dice: Random) -> None:
        if self.duties:
            self.handle(self.duties.popleft())

    def chunk(self, dice: Random) -> None:
        if not self.wanted:
            return
        link, blob = self.wanted.popleft()
        if dice.randrange(2):
            self.chunks[blob] = self.core.fetcher.expected_size(blob) or 1
            self.handle(ev.ChunkArrived(blob))
        else:
            self.handle(ev.ChunkFailed(link, blob))

    def snapshot(self, dice: Random) -> None:
        """A snapshot that the core asked for turns out to be none."""
        if self.fetched:
            lie = self.fetched.popleft()
            self.duties = deque(duty for duty in self.duties if duty != ev.Adopted(lie))
            self.handle(ev.Unusable(lie))

    def publish(self, dice: Random) -> None:
        if any(isinstance(duty, ev.Stored) for duty in self.duties):
            return  # a trainer publishes nothing before the last delta is acknowledged
        round_ = self.core.own_last + dice.choice((0, 1, 1, 3))
        if round_ >= 1:
            loss = dice.choice((2.5, math.nan, math.inf))
            self.handle(ev.Publish(builders.body_of(dice.randbytes(9), "int8", round_, 2, loss=loss)))

    def pause(self, dice: Random) -> None:
        self.handle(ev.Paused())

    def need(self, dice: Random) -> None:
        self.handle(
            ev.Need(dice.choice(list(self.known))[:32], ((dice.randbytes(32), 100), (self.known[-1][:32], 7)))
        )

    def progress(self, dice: Random) -> None:
        self.handle(ev.Progress(3, abs(dice.choice(INTS[:20])), math.nan, math.inf, "cpu"))

    def leave(self, dice: Random) -> None:
        if dice.randrange(10) == 0:
            self.handle(ev.Leave())


MOVES = (
    *(Siege.up, Siege.up, Siege.up, Siege.down, Siege.dialled, Siege.garbage, Siege.speak, Siege.speak),
    *(
        Siege.speak,
        Siege.speak,
        Siege.records_,
        Siege.records_,
        Siege.records_,
        Siege.records_,
        Siege.reflect,
    ),
    *(Siege.reflect, Siege.repeat, Siege.pass_time, Siege.wake, Siege.wake, Siege.duty, Siege.duty),
    *(Siege.snapshot, Siege.chunk, Siege.chunk, Siege.publish, Siege.pause, Siege.need, Siege.progress),
    Siege.leave,
)


_SEEDS: list[bytes] = []


def record_seeds_once() -> list[bytes]:
    if not _SEEDS:
        _SEEDS.extend(record_seeds())
    return _SEEDS


def tables(core: Replica) -> Iterator[tuple[str, int]]:
    """Name and size of every container in the core's state machines and their parts."""
    machines: list[tuple[str, Any]] = [("", core)]
    seen = {id(core)}
    for prefix, machine in machines:
        for name, value in vars(machine).items():
            if isinstance(value, dict | list | set | deque | tuple):
                if machine is not core:
                    yield prefix + name, len(value)
            elif (
                type(value).__module__.startswith("gossamer.protocol")
                and hasattr(value, "__dict__")
                and id(value) not in seen
            ):
                seen.add(id(value))
                machines.append((f"{prefix}{name}.", value))


def _siege(data: bytes) -> Iterator[None]:
    with bounds(tight=bool(data[:1]) and data[0] % 2 == 1):
        siege = Siege(data[0] if data else 0)
        for start in range(1, min(len(data), MOVES_MAX * MOVE_BYTES), MOVE_BYTES):
            move = data[start : start + MOVE_BYTES]
            dice = Random(move)
            MOVES[move[0] % len(MOVES)](siege, dice)
    if siege.counts["messages decoded"]:
        yield


def _siege_seeds() -> list[bytes]:
    """Runs that begin with links and then do a little of everything."""
    dice = Random(7)
    code = {move: index for index, move in reversed(list(enumerate(MOVES)))}
    begin = b"".join(bytes([code[Siege.up]]) + dice.randbytes(5) for _ in range(4))
    found = []
    for number in range(24):
        moves = b"".join(dice.randbytes(MOVE_BYTES) for _ in range(dice.choice((10, 20, 40))))
        found.append(bytes([number]) + begin + moves)
    return found


def _mutate_moves(data: bytes, dice: Random) -> bytes:
    """Change, drop, repeat, exchange or add whole moves."""
    moves = [data[start : start + MOVE_BYTES] for start in range(1, len(data), MOVE_BYTES)]
    at = dice.randrange(len(moves) + 1)
    match dice.randrange(4):
        case 0:
            moves[at : at + 1] = [dice.randbytes(MOVE_BYTES)]
        case 1:
            del moves[at : at + dice.choice((1, 1, 5))]
        case 2:
            moves[at:at] = [dice.randbytes(MOVE_BYTES) for _ in range(dice.choice((1, 3, 12)))]
        case _:
            moves[at:at] = moves[dice.randrange(len(moves) + 1) :][:4]
    return data[:1] + b"".join(moves)[: MOVES_MAX * MOVE_BYTES]


SIEGE = Target("replica", _siege, _siege_seeds, errors=(), mutate=_mutate_moves, share=0.6)
