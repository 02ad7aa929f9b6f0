"""The chunk transfers of one node, as the daemon does them: gets at once, a few puts at a time per link."""

import random
from collections import Counter, deque
from hashlib import sha256
from typing import TYPE_CHECKING

from gossamer.protocol import effects as fx
from gossamer.protocol import events as ev
from gossamer.protocol.limits import ASKS_PER_LINK_MAX, PUTS_PER_LINK_MAX
from gossamer.protocol.messages import Decline, encode
from gossamer.protocol.records import Delta
from tests.sim.disk import DamagedChunkError
from tests.sim.exchange import Exchange
from tests.sim.network import End

if TYPE_CHECKING:
    from tests.sim.node import Node

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

    def _arrived(self, blob: bytes, data: bytes) -> None:
        node = self._node
        node.chunks_came += 1
        node.stage.audit.spread.chunk_came(twice=node.disk.has(blob))
        node.disk.put(blob, data, node.stage.loop.now)
        node.stage.trace.note(node.stage.loop.now, node.index, 5, blob)
        node.dispatch(ev.ChunkArrived(blob))

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

    def _exchange(self, end: End, upload: int, serve: "Serve", done: "Done") -> None:
        Exchange(
            net=self._node.stage.net,
            source=self._node,
            target=end.peer.party,
            upload_bytes=upload,
            serve=serve,
            done=done,
        ).start()


if TYPE_CHECKING:
    from collections.abc import Callable

    Serve = Callable[[], bytes | None]
    Done = Callable[[bytes | None], None]


def _node_of(end: End) -> "Node":
    from tests.sim.node import Node  # here, since the modules import each other

    assert isinstance(end.party, Node)
    return end.party
