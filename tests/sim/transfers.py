"""The chunk transfers of one node, as the daemon does them: gets at once, a few puts at a time per link.

Each chunk, fetched or put, is one HTTP request on a connection of its own. It is retried while the hosts
cannot reach each other, and given up after the timeout of the real client.
"""

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING

from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.limits import ASKS_PER_LINK_MAX, FETCH_TIMEOUT_S, PUTS_PER_LINK_MAX
from gossamer.protocol.messages import Decline, encode
from gossamer.protocol.records import Delta
from tests.sim.disk import DamagedChunkError
from tests.sim.network import FRAME_BYTES, End, Network, Party

if TYPE_CHECKING:
    from tests.sim.node import Node

Answer = bytes | None
HEADER_BYTES = 300


class NoAnswerError(Exception):
    """Raised by the server to keep the connection open and never answer."""


class LateAnswerError(Exception):
    """Raised by the server to answer `seconds` later."""

    def __init__(self, seconds: float, answer: Answer) -> None:
        super().__init__(seconds, answer)
        self.seconds, self.answer = seconds, answer


@dataclass(slots=True, kw_only=True)
class Exchange:
    """One request. `serve` runs in the target's process, `done` in the source's, with None if it failed."""

    net: Network
    source: Party
    target: Party
    upload_bytes: int
    serve: Callable[[], Answer]
    done: Callable[[Answer], None]
    source_life: int = 0
    target_life: int = 0
    begun: float = 0.0

    def start(self) -> None:
        self.source_life, self.target_life = self.source.life, self.target.life
        self.begun = self.net.loop.now
        self._ask(0.2)

    def _finish(self, answer: Answer) -> None:
        self.source.deliver(self.source_life, self.done, answer)

    def _travel(self, source: Party, target: Party, size: int) -> float:
        path = self.net.paths[source.index, target.index]
        delay = (path.latency_s + path.jitter_s * self.net.rng.random()) * self.net.weather.slowness
        if self.net.rng.random() < path.loss + self.net.weather.loss:
            delay += 0.2 + self.net.rng.random()
        return delay + (size + HEADER_BYTES + FRAME_BYTES) / path.bytes_per_s

    def _wait(self, again: Callable[..., None], wait: float, *args: Answer) -> None:
        loop = self.net.loop
        if loop.now + wait < self.begun + FETCH_TIMEOUT_S:
            loop.after(wait, again, 2 * wait, *args)
        else:
            loop.at(self.begun + FETCH_TIMEOUT_S, self._finish, None)

    def _ask(self, wait: float) -> None:
        if self.net.is_closed(self.source.index, self.target.index):
            self._wait(self._ask, wait)
            return
        self.net.loop.after(self._travel(self.source, self.target, self.upload_bytes), self._reach)

    def _reach(self) -> None:
        alive = self.target.running and self.target.life == self.target_life
        if alive:
            self.target.deliver(self.target_life, self._serve)
        elif self.target.powered:
            self._finish(None)  # refused, or reset
        else:
            self.net.loop.at(self.begun + FETCH_TIMEOUT_S, self._finish, None)

    def _serve(self) -> None:
        late_s = 0.0
        try:
            answer = self.serve()
        except LateAnswerError as late:
            late_s, answer = late.seconds, late.answer
        except NoAnswerError:
            self.net.loop.at(self.begun + FETCH_TIMEOUT_S, self._finish, None)
            return
        mischief = self.net.weather.mischief
        if answer and mischief is not None and self.net.rng.random() < mischief.damage:
            answer = answer[:-1] + bytes([answer[-1] ^ 1])
        travel_s = self._travel(self.target, self.source, len(answer or b""))
        self.net.loop.after(late_s + travel_s, self._return, 0.2, answer)

    def _return(self, wait: float, answer: Answer) -> None:
        if self.net.is_closed(self.source.index, self.target.index):
            self._wait(self._return, wait, answer)
        else:
            self._finish(answer)


ACCEPTED, REFUSED = b"204", None


class Transfers:
    """Carries out Get and Put for one life of a node."""

    def __init__(self, node: "Node") -> None:
        self._node = node
        self._asked: dict[int, deque[bytes]] = {}
        self._serving: Counter[int] = Counter()
        """Puts under way on a link."""
        self.unsure: Delta | None = None
        """Our own record while it is being written to disk: after a crash it may be there or not."""

    def settle_unsure(self, rng: random.Random) -> None:
        """The process dies: decide whether the record that was being written is on the disk."""
        if self.unsure is not None and rng.random() < 0.5:
            self._node.disk.commit(self.unsure)

    def link_up(self, end: End) -> None:
        if end.address is not None:
            self._asked[end.number] = deque()

    def link_down(self, link: int) -> None:
        self._asked.pop(link, None)
        self._serving.pop(link, None)

    def read(self, blob: bytes) -> bytes | None:
        """A chunk from disk; None if it is not here."""
        if not self._node.disk.has(blob):
            return None
        self._node.archive.touch(blob)
        try:
            return self._node.disk.get(blob)
        except DamagedChunkError:
            self._node.chunk_damaged(blob)
            return None

    # -- getting

    def get(self, end: End | None, effect: fx.Get) -> None:
        """Fetch a chunk from a peer that we dialled."""
        if end is None:
            return
        server = end.peer

        def serve() -> bytes | None:
            return _node_of(server).transfers.give(effect.blob) if server.is_open else None

        def done(data: bytes | None) -> None:
            if data is not None and len(data) <= effect.size and sha256(data).digest() == effect.blob:
                self._arrived(effect.blob, data)
            self._node.dispatch(ev.ChunkFailed(effect.link, effect.blob))  # as the daemon does, always

        self._exchange(end, 0, serve, done)

    def keep(self, effect: fx.Keep) -> None:
        """A chunk came along with its record."""
        if len(effect.data) == effect.size and sha256(effect.data).digest() == effect.blob:
            self._arrived(effect.blob, effect.data)
        self._node.dispatch(ev.ChunkFailed(effect.link, effect.blob))

    def _arrived(self, blob: bytes, data: bytes) -> None:
        node = self._node
        node.chunks_came += 1
        twice = node.disk.has(blob)
        node.disk.put(blob, data, node.stage.loop.now)
        node.stage.trace.note(node.stage.loop.now, node.index, 5, blob)
        node.dispatch(ev.ChunkArrived(blob))
        node.stage.audit.spread.chunk_came(node, blob, twice=twice)

    def take(self, blob: bytes, data: bytes) -> bytes | None:
        """A peer puts a chunk to us: accept it if we asked for it."""
        size = self._node.core.fetcher.expected_size(blob)
        if size is None or len(data) > size or sha256(data).digest() != blob:
            return REFUSED
        self._arrived(blob, data)
        return ACCEPTED

    # -- giving

    def give(self, blob: bytes) -> bytes | None:
        """Answer a peer that gets a chunk from us; None if it is not here."""
        return self.read(blob)

    # -- putting

    def asked(self, end: End | None, blob: bytes) -> None:
        """A peer that we dialled asks us to put a chunk: queue it, or decline."""
        if end is None:
            return
        queue = self._asked.get(end.number)
        if queue is None or len(queue) >= ASKS_PER_LINK_MAX:
            self._node.send(end.number, encode(Decline(blob)))
            return
        queue.append(blob)
        self._put_next(end)

    def _put_next(self, end: End) -> None:
        queue = self._asked.get(end.number)
        if not queue or self._serving[end.number] >= PUTS_PER_LINK_MAX:
            return
        self._serving[end.number] += 1
        blob = queue.popleft()
        data = self.read(blob)
        receiver = end.peer

        def serve() -> bytes | None:
            return _node_of(receiver).transfers.take(blob, data) if receiver.is_open and data else REFUSED

        def done(answer: bytes | None) -> None:
            self._serving[end.number] -= 1
            if answer is None:
                self._node.send(end.number, encode(Decline(blob)))
            self._put_next(end)

        if data is None:
            done(REFUSED)
        else:
            self._exchange(end, len(data), serve, done)

    def _exchange(
        self, end: End, upload: int, serve: Callable[[], Answer], done: Callable[[Answer], None]
    ) -> None:
        Exchange(
            net=self._node.stage.net,
            source=self._node,
            target=end.peer.party,
            upload_bytes=upload,
            serve=serve,
            done=done,
        ).start()


def _node_of(end: End) -> "Node":
    from tests.sim.node import Node  # here, since the modules import each other

    assert isinstance(end.party, Node)
    return end.party
