"""A bad network on one machine: a TCP proxy between local nodes, with a rule for every ordered pair.

A rule applies to the bytes that go one way between two nodes, whichever of them dialled. Rules may change at
any time, and then apply at once to open connections too.

Each node gets a listener in front of its real port and advertises that (``--advertise``). The proxy knows a
dialling node by its source address: each node listens on, and so dials from, its own loopback address,
127.0.0.x. A connection from elsewhere (a person's ``gossamer status``) meets no faults.

Data under way is bounded: after `PIECES_MAX` pieces in a direction, no more is read from the sender.
"""

import asyncio
import logging
import random
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations

from gossamer.protocol.errors import ConfigError

PIECE_BYTES = 16 * 1024
PIECES_MAX = 256
"""4 MiB under way: enough for 300 Mbit/s at 100 ms."""

CONNECTIONS_MAX = 256
"""Most connections open at once to one node. A node that is cut off keeps dialling, and its vain attempts end
here."""

LISTEN_HOST = "127.0.0.1"
_LINGER_NOT = struct.pack("ii", 1, 0)

log = logging.getLogger("gossamer.faults")


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
