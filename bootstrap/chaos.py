"""`gossamer swarm --chaos`: a storm passes over the local swarm while it trains.

A node is killed and comes back from its own folder, another joins late, the network splits in halves and
heals, and the bootstrap peer dies for good. Events come at fractions of the rounds, to fit any ``--rounds``.

Every event has a recovery time, measured by asking all nodes twice a second:

=============== =======================================================================================
killed, split,  until every living node has published a round later than its last one before the event: the
bootstrap_died  others, both halves and the orphans train on
returned,       until that node trains and its last round is at most one behind the swarm's (the median of
joined          the nodes' last rounds); the start of its processes and importing torch count
healed          until all living nodes have merged exactly the same records up to the highest round that
                any of them had published when the network became whole (equal digests)
=============== =======================================================================================
"""

import asyncio
import logging
import random
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import permutations
from statistics import median_low
from typing import Any

from gossamer.bootstrap.processes import NodeProcess
from gossamer.node.address import parse_address
from gossamer.node.home import Home
from gossamer.protocol.errors import ConfigError

# --- What can be wrong on the way from one node to another: the rules of a `FaultProxy`.
#
# A rule belongs to an ordered pair of nodes, and applies to the bytes that go that way, whichever of the two
# dialled. Rules may change at any time, and then apply at once to open connections too.


class Bandwidth:
    """A line of limited speed. Rules with the same `Bandwidth` share it, as a node's uplink is shared."""

    def __init__(self, bits_per_s: float) -> None:
        self._bits_per_s = bits_per_s
        self._free_at = 0.0

    async def send(self, count: int) -> None:
        """Wait as long as `count` bytes take, after what was sent before."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + 8 * count / self._bits_per_s
        await asyncio.sleep(self._free_at - now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What happens to bytes on their way; by default nothing."""

    black_hole: bool = False
    """Nothing arrives. Nothing is lost either: data arrives after healing, as TCP would resend it."""
    refuse: bool = False
    """New connections are reset at once."""
    latency_s: float = 0.0
    bandwidth: Bandwidth | None = None
    slice_bytes: int = 0
    """Write at most this many bytes at a time; 0 leaves writes as they come."""
    reset_every_bytes: int = 0
    """Reset the connection after this many bytes on average; 0 for never."""
    corrupt_every_bytes: int = 0
    """Flip a bit every this many bytes on average; 0 for never."""


CLEAR = Rule()


class Rules:
    """The rule of every ordered pair of nodes, by name."""

    def __init__(self) -> None:
        self._rules: dict[tuple[str, str], Rule] = {}
        self._changed = asyncio.Event()

    def of(self, src: str, dst: str) -> Rule:
        return self._rules.get((src, dst), CLEAR)

    def set(self, src: str, dst: str, rule: Rule) -> None:
        """From now on, apply this rule to what `src` sends to `dst`."""
        self._rules[src, dst] = rule
        self._changed.set()
        self._changed = asyncio.Event()

    def set_all(self, names: Iterable[str], rule: Rule) -> None:
        """Set the rule from each of these nodes to each other."""
        for src, dst in permutations(names, 2):
            self.set(src, dst, rule)

    def connect_only(self, names: Iterable[str], edges: Iterable[tuple[str, str]]) -> None:
        """Give the network any shape: of these nodes, only two that an edge joins hear each other."""
        open_pairs = {frozenset(edge) for edge in edges}
        for src, dst in permutations(names, 2):
            hole = frozenset((src, dst)) not in open_pairs
            self.set(src, dst, replace(self.of(src, dst), black_hole=hole))

    def split(self, *sides: Iterable[str]) -> None:
        """Split the network: each side hears only itself."""
        groups = [list(side) for side in sides]
        names = [name for group in groups for name in group]
        self.connect_only(names, (edge for group in groups for edge in permutations(group, 2)))

    def heal(self) -> None:
        """Remove all black holes; other rules stay."""
        for (src, dst), rule in list(self._rules.items()):
            self.set(src, dst, replace(rule, black_hole=False))

    async def passable(self, src: str, dst: str) -> None:
        """Wait while the way is a black hole."""
        while self.of(src, dst).black_hole:
            await self._changed.wait()


# --- A bad network on one machine: a TCP proxy between local nodes, with a fault for every ordered pair.
#
# Each node gets a listener in front of its real port and advertises that (``--advertise``). The proxy knows a
# dialling node by its source address: each node listens on, and so dials from, its own loopback address,
# 127.0.0.x. A connection from elsewhere (a person's ``gossamer status``) meets no faults.
#
# Data under way is bounded: after `PIECES_MAX` pieces in a direction, no more is read from the sender.

PIECE_BYTES = 16 * 1024
PIECES_MAX = 256
"""4 MiB under way: enough for 300 Mbit/s at 100 ms."""

CONNECTIONS_MAX = 256
"""Most connections open at once to one node. A node that is cut off keeps dialling, and its vain attempts end
here."""

LISTEN_HOST = "127.0.0.1"
_LINGER_NOT = struct.pack("ii", 1, 0)

log = logging.getLogger("gossamer.faults")


def own_loopback(number: int) -> str:
    """The loopback address of the `number`-th node, counted from 0.

    Raises ConfigError if the system has only one loopback address.
    """
    address = f"127.0.0.{number + 2}"
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            raise ConfigError(
                f"faults between local nodes need one loopback address per node, and {address} is missing;"
                f" on macOS add it first: sudo ifconfig lo0 alias {address}"
            ) from None
    return address


def _reset(writer: asyncio.StreamWriter) -> None:
    """End a connection with a RST instead of a FIN."""
    connection = writer.get_extra_info("socket")
    if connection is not None and not writer.is_closing():
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER_NOT)
    writer.transport.abort()


def _slices(data: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


@dataclass(frozen=True, slots=True)
class _Way:
    """One direction of one connection."""

    src: str
    dst: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class FaultProxy:
    """Listeners in front of local nodes; `rules` may be changed at any time."""

    def __init__(self, seed: int = 0) -> None:
        self.rules = Rules()
        self._random = random.Random(seed)
        self._names: dict[str, str] = {}
        self._servers: list[asyncio.Server] = []
        self._connections: dict[asyncio.Task[None], tuple[str, str]] = {}

    async def add(self, name: str, source: str, target: Callable[[], tuple[str, int] | None]) -> str:
        """Put a listener in front of a node that dials from `source`; returns the address to advertise.

        `target` returns where the node listens now, None if it does not.
        """
        self._names[source] = name

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            src = self._names.get(writer.get_extra_info("peername", ("",))[0], "")
            task = asyncio.create_task(self._serve(src, name, target, reader, writer))
            self._connections[task] = (src, name)
            task.add_done_callback(lambda done: self._connections.pop(done, None))

        server = await asyncio.start_server(accept, LISTEN_HOST, 0, limit=PIECE_BYTES)
        self._servers.append(server)
        host, port = server.sockets[0].getsockname()
        return f"{host}:{port}"

    def connections(self, src: str, dst: str) -> int:
        """How many connections `src` has to `dst`."""
        return sum(pair == (src, dst) for pair in self._connections.values())

    async def close(self) -> None:
        """Stop listening and reset everything."""
        for server in self._servers:
            server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    # -- one connection

    async def _serve(
        self,
        src: str,
        dst: str,
        target: Callable[[], tuple[str, int] | None],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Carry a connection from `src` to `dst` until either ends it."""
        onward: asyncio.StreamWriter | None = None
        try:
            crowded = sum(to == dst for _, to in self._connections.values()) > CONNECTIONS_MAX
            if self.rules.of(src, dst).refuse or crowded:
                return
            await self.rules.passable(src, dst)
            where = target()
            if where is None:
                return
            back, onward = await asyncio.open_connection(*where, limit=PIECE_BYTES)
            await self._carry(_Way(src, dst, reader, onward), _Way(dst, src, back, writer))
            writer.close()
            onward.close()
        except OSError as error:
            log.debug("from %s to %s: %s", src, dst, error)
        finally:
            for end in (writer, onward):
                if end is not None and not end.is_closing():
                    _reset(end)

    async def _carry(self, there: _Way, back: _Way) -> None:
        """Carry both directions until one has ended. Raises OSError if it did not end in good order."""
        tasks = [asyncio.create_task(self._pump(way)) for way in (there, back)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _pump(self, way: _Way) -> None:
        """Carry one direction until its sender closes. Raises OSError if either end is gone, as soon as the
        rules let the other end know."""
        queue: asyncio.Queue[tuple[float, bytes | OSError]] = asyncio.Queue(PIECES_MAX)
        reading = asyncio.create_task(self._read(way.reader, queue))
        try:
            while True:
                since, data = await queue.get()
                await asyncio.sleep(since + self._rule(way).latency_s - asyncio.get_running_loop().time())
                await self.rules.passable(way.src, way.dst)
                if isinstance(data, OSError):
                    raise data
                if not data:
                    return
                try:
                    await self._write(way, data)
                except OSError:
                    await self.rules.passable(way.dst, way.src)  # the news of its end must get through too
                    raise
        finally:
            reading.cancel()

    @staticmethod
    async def _read(
        reader: asyncio.StreamReader, queue: asyncio.Queue[tuple[float, bytes | OSError]]
    ) -> None:
        data: bytes | OSError = b"-"
        while data and not isinstance(data, OSError):
            try:
                data = await reader.read(PIECE_BYTES)
            except OSError as error:
                data = error
            await queue.put((asyncio.get_running_loop().time(), data))

    async def _write(self, way: _Way, data: bytes) -> None:
        for piece in _slices(data, self._rule(way).slice_bytes or PIECE_BYTES):
            rule = self._rule(way)
            if rule.bandwidth is not None:
                await rule.bandwidth.send(len(piece))
                await self.rules.passable(way.src, way.dst)
            if self._strikes(rule.reset_every_bytes, len(piece)):
                raise ConnectionResetError("the rule says so")
            if self._strikes(rule.corrupt_every_bytes, len(piece)):
                broken = bytearray(piece)
                broken[self._random.randrange(len(broken))] ^= 1 << self._random.randrange(8)
                piece = bytes(broken)
            way.writer.write(piece)
            await way.writer.drain()
            if rule.slice_bytes:
                await asyncio.sleep(0)  # otherwise the kernel would join the next slice to this one

    def _rule(self, way: _Way) -> Rule:
        return self.rules.of(way.src, way.dst)

    def _strikes(self, every_bytes: int, count: int) -> bool:
        return every_bytes > 0 and self._random.random() < count / every_bytes


NODES_MIN = 2
PAUSE_S = 4.0
"""The least time between two events: near the end of a short run, the rounds for several may have passed."""

RECOVERY_S_MAX = 120.0
"""How long to wait after the last event for what has not recovered."""

AWAY_ROUNDS_MAX = 100
"""The longest absence or split in rounds: a split must stay well under the history's `retain`, or one side
would start over."""


class Kind(StrEnum):
    """What can happen."""

    KILLED = "killed"
    RETURNED = "returned"
    JOINED = "joined"
    SPLIT = "split"
    HEALED = "healed"
    BOOTSTRAP_DIED = "bootstrap_died"


@dataclass(slots=True)
class Happening:
    """One event of the storm, and how long its consequences lasted."""

    kind: Kind
    node: str | None
    """The node that it struck; None for all."""
    text: str
    cure: str
    """What has happened once the swarm has recovered."""
    t_s: float
    """Seconds since the swarm began."""
    is_over: Callable[[], bool]
    recovered_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "t_s": round(self.t_s, 2),
            "kind": self.kind.value,
            "node": self.node,
            "text": self.text,
            "recovered_s": self.recovered_s,
        }


class Storm:
    """Makes the events happen, and watches how the swarm recovers: in `look`, after every refresh."""

    def __init__(
        self,
        rounds: int,
        boot: NodeProcess,
        nodes: list[NodeProcess],
        start_another: Callable[[], NodeProcess],
    ) -> None:
        """`start_another` starts one more node and adds it to `nodes`. Raises ConfigError."""
        if len(nodes) < NODES_MIN:
            raise ConfigError(
                f"--chaos needs --nodes {NODES_MIN} or more: when one is killed, the others must train on"
            )
        self._rounds = rounds
        self._boot = boot
        self._nodes = nodes
        self._start_another = start_another
        self._proxy = FaultProxy()
        self._begun = time.monotonic()
        self._last_at = self._begun
        self.events: list[Happening] = []
        self.log: list[str] = []
        """What happened and what recovered, one line of text each."""
        self.up_to: int | None = None
        """A round whose prefix digest the nodes should be asked for."""
        kill, split = self._at(0.15), self._at(0.5)
        self._script = deque(
            [
                (kill, self._kill),
                (min(self._at(0.3), kill + AWAY_ROUNDS_MAX), self._bring_back),
                (self._at(0.35), self._let_join),
                (split, self._split),
                (min(self._at(0.7), split + AWAY_ROUNDS_MAX), self._heal),
                (self._at(0.8), self._kill_bootstrap),
            ]
        )

    def _at(self, fraction: float) -> int:
        return max(1, round(fraction * self._rounds))

    # -- the network

    async def listen(self, number: int, process: NodeProcess) -> tuple[str, list[str]]:
        """Put the proxy in front of a node; returns its address there and the node's own arguments for it.

        Raises ConfigError if the system has only one loopback address.
        """
        source = own_loopback(number)
        home = Home(process.folder)

        def target() -> tuple[str, int] | None:
            facts = home.read_daemon()
            return parse_address(str(facts["address"])) if facts is not None else None

        address = await self._proxy.add(process.name, source, target)
        return address, ["--listen", f"{source}:0", "--advertise", address]

    async def close(self) -> None:
        await self._proxy.close()

    # -- the script

    @property
    def over(self) -> bool:
        """Whether every event has happened, and everything has recovered or taken too long."""
        recovered = all(event.recovered_s is not None for event in self.events)
        return not self._script and (recovered or time.monotonic() - self._last_at > RECOVERY_S_MAX)

    def look(self) -> None:
        """After statuses were refreshed: note what has recovered, and start what is due."""
        now = time.monotonic()
        for event in self.events:
            if event.recovered_s is None and event.is_over():
                event.recovered_s = round(now - self._begun - event.t_s, 2)
                self.log.append(f"{event.cure}, after {event.recovered_s:.1f} s")
        if self._script and now - self._last_at >= PAUSE_S and self._progress() >= self._script[0][0]:
            _, action = self._script.popleft()
            self._last_at = now
            action()

    def _happens(
        self, kind: Kind, node: str | None, text: str, cure: str, is_over: Callable[[], bool]
    ) -> None:
        at = time.monotonic() - self._begun
        self.events.append(Happening(kind, node, text, cure, at, is_over))
        self.log.append(text)

    def _kill(self) -> None:
        victim = self._nodes[1]
        victim.kill()
        text = f"{victim.name} is killed with all its processes (SIGKILL)"
        self._happens(Kind.KILLED, victim.name, text, "the other nodes train on", self._all_advance())

    def _bring_back(self) -> None:
        victim = self._nodes[1]
        victim.start()
        text, cure = f"{victim.name} restarts from its own folder", f"{victim.name} trains in step again"
        self._happens(Kind.RETURNED, victim.name, text, cure, lambda: self._in_step(victim))

    def _let_join(self) -> None:
        late = self._start_another()
        text, cure = f"{late.name} joins late", f"{late.name} trains in step with the others"
        self._happens(Kind.JOINED, late.name, text, cure, lambda: self._in_step(late))

    def _split(self) -> None:
        names = [process.name for process in self._nodes]
        one, other = [self._boot.name, *names[::2]], names[1::2]
        self._proxy.rules.split(one, other)
        text = f"the network splits: {', '.join(one)} | {', '.join(other)}"
        self._happens(Kind.SPLIT, None, text, "both sides train on", self._all_advance())

    def _heal(self) -> None:
        self._proxy.rules.heal()
        self.up_to = up_to = max(self._rounds_of(self._trainers()).values(), default=0)
        text, cure = "the network is whole again", f"all are identical up to round {up_to}"
        self._happens(Kind.HEALED, None, text, cure, lambda: self._same_up_to(up_to))

    def _kill_bootstrap(self) -> None:
        self._boot.kill()
        text = "the bootstrap peer is killed, for good (SIGKILL)"
        self._happens(Kind.BOOTSTRAP_DIED, self._boot.name, text, "all nodes train on", self._all_advance())

    # -- recovery

    def _trainers(self) -> list[NodeProcess]:
        """The living nodes that answer."""
        return [process for process in self._nodes if not process.killed and process.status is not None]

    @staticmethod
    def _rounds_of(processes: list[NodeProcess]) -> dict[str, int]:
        return {process.name: process.status["round"] for process in processes if process.status is not None}

    def _progress(self) -> int:
        """The median of the last rounds of all nodes that have published any."""
        return median_low([r for r in self._rounds_of(self._trainers()).values() if r] or [0])

    def _all_advance(self) -> Callable[[], bool]:
        """A test whether all nodes that live now have since published a later round, or have no more to
        publish."""
        before = self._rounds_of(self._trainers())

        def advanced() -> bool:
            after = self._rounds_of(self._trainers())
            return all(
                after[name] > round_ or round_ >= self._rounds
                for name, round_ in before.items()
                if name in after
            )

        return advanced

    def _in_step(self, process: NodeProcess) -> bool:
        status = process.status
        return (
            status is not None
            and status["state"] in ("training", "finished")
            and status["round"] >= self._progress() - 1
        )

    def _same_up_to(self, up_to: int) -> bool:
        prefixes = [(process.status or {}).get("prefix") for process in self._trainers()]
        found = {prefix["digest"] for prefix in prefixes if prefix and prefix["up_to"] == up_to}
        return len(found) == 1 and None not in found and None not in prefixes
