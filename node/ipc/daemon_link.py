"""The trainer's side of the connection to its daemon: a background thread, so that training never waits.

The training thread looks at plain attributes and leaves messages in a queue. If the daemon dies, training
goes on alone; the thread reconnects, and a delta that was not acknowledged is handed over again.
"""

import queue
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from gossamer.node.ipc import control
from gossamer.node.ipc.shared import SharedMemory
from gossamer.protocol.errors import MalformedError, UnreachableError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.layout import Fragment
from gossamer.protocol.manifest import Manifest

CONNECT_TIMEOUT_S = 60.0
"""How long a trainer waits for its daemon, which reads its model back before it listens to one."""

RECONNECT_S = 0.5
OUTBOX_MAX = 256


@dataclass(frozen=True, slots=True)
class Offer:
    """A fragment of Phi that the daemon has left in shared memory.

    It brings the memory along: should the daemon die, what it offered can still be read, and is never
    mistaken for memory of the next one.
    """

    fragment: int
    merged_round: int
    own_round: int
    version: int
    shared: SharedMemory

    def values(self, fragment: Fragment) -> Ints:
        """The fragment's values, a view; read them before `took`."""
        return self.shared.phi(fragment)


class DaemonLink:
    """What the daemon last said, and a way to answer. Thread-safe where it says so."""

    def __init__(self, path: str, manifest: Manifest) -> None:
        self._path = path
        self._manifest = manifest
        self._lock = threading.Lock()
        self._outbox: queue.Queue[control.ControlMessage | None] = queue.Queue(OUTBOX_MAX)
        self._shared: SharedMemory | None = None
        self._attached = False
        """Whether the daemon of `_shared`, which stays mapped when it dies, still listens."""
        self._offers: dict[int, Offer] = {}
        self._unacknowledged: tuple[control.Publish, memoryview] | None = None
        """It stays where it was written: nothing else is, before it is acknowledged."""
        self._closing = threading.Event()
        self._connected = threading.Event()
        self.node_id = b""
        self.clock = 0
        self.own_last = 0
        """The last round that the daemon has signed for us, or that we have handed over."""
        self.swarm_tokens = 0
        self.links = 0
        """Nodes that the daemon is linked to now."""
        self.stop_asked = threading.Event()
        self._thread = threading.Thread(target=self._run, name="daemon-link", daemon=True)
        self._thread.start()

    # -- the training thread

    def wait_connected(self, timeout_s: float) -> None:
        """Wait for the first connection. Raises UnreachableError."""
        if not self._connected.wait(timeout_s):
            raise UnreachableError(f"no daemon answers at {self._path}; start it with: gossamer node")

    @property
    def can_publish(self) -> bool:
        """Whether the payload area is ours: connected, and the last delta acknowledged."""
        return self._attached and self._unacknowledged is None

    @property
    def payload_area(self) -> memoryview:
        """Where to write the next payload, once `can_publish`."""
        assert self._shared is not None
        return self._shared.payload

    def publish(self, message: control.Publish, area: memoryview) -> None:
        """Hand over what was written to `area`, which was `payload_area` when the writing began.

        Since then the daemon may have died, and then the next one gets it as it comes; or that one is here
        already, with a payload area of its own.
        """
        payload = area[: message.payload_bytes]
        with self._lock:
            self._unacknowledged = (message, payload)
            self.own_last = message.round
            if self._attached and self._shared is not None:
                if not self._shared.is_payload(area):
                    self._shared.payload[: len(payload)] = payload
                self.send(message)

    def take_offer(self) -> Offer | None:
        """The next fragment of Phi that is ready in shared memory."""
        if not self._offers:
            return None
        with self._lock:
            return self._offers.pop(next(iter(self._offers)), None) if self._offers else None

    def took(self, offer: Offer) -> None:
        """Give a fragment's area back to the daemon."""
        with self._lock:
            if offer.shared is self._shared:
                self.send(control.Took(offer.fragment))

    def send(self, message: control.ControlMessage) -> None:
        """Leave a message for the daemon; drops it if the daemon has stopped listening."""
        with suppress(queue.Full):
            self._outbox.put_nowait(message)

    def wait_acknowledged(self, timeout_s: float) -> bool:
        """Wait until the last delta is durable with the daemon. Returns whether it is."""
        deadline = time.monotonic() + timeout_s
        while self._unacknowledged is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        return self._unacknowledged is None

    def close(self) -> None:
        """Send what is queued, then disconnect."""
        self._closing.set()
        with suppress(queue.Full):
            self._outbox.put_nowait(None)
        self._thread.join(2.0)

    # -- the background threads

    def _run(self) -> None:
        while not self._closing.is_set():
            with suppress(OSError, MalformedError):
                self._connect_and_listen()
            self._attached = False
            self._closing.wait(RECONNECT_S)

    def _connect_and_listen(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(self._path)
            prefix, fds, _, _ = socket.recv_fds(connection, control.LENGTH_BYTES, 1)
            body = control.receive_exactly(connection, control.frame_length(prefix))
            welcome = control.decode(body)
            if not isinstance(welcome, control.Welcome) or not fds:
                raise MalformedError("the daemon did not welcome us")
            shared = SharedMemory(self._manifest, fds[0])
            shared.close()  # the mapping stays
            self._begin(welcome, shared)
            sender = threading.Thread(target=self._send_all, args=(connection,), daemon=True)
            sender.start()
            try:
                while True:
                    self._handle(control.receive(connection), shared)
            finally:
                self._drop_outbox()
                sender.join(2.0)

    def _begin(self, welcome: control.Welcome, shared: SharedMemory) -> None:
        with self._lock:
            self._offers.clear()
            self._drop_outbox_items()
            self.node_id = welcome.node_id
            self.clock = welcome.clock
            pending = self._unacknowledged
            if pending is not None and welcome.own_last < pending[0].round:
                shared.payload[: len(pending[1])] = pending[1]
                self._outbox.put_nowait(pending[0])
            else:
                self._unacknowledged = None
                self.own_last = max(self.own_last, welcome.own_last)
            self._shared = shared
            self._attached = True
        self._connected.set()

    def _handle(self, message: control.ControlMessage, shared: SharedMemory) -> None:
        match message:
            case control.Phi():
                with self._lock:
                    self._offers[message.fragment] = Offer(
                        message.fragment, message.merged_round, message.own_round, message.version, shared
                    )
            case control.Published():
                with self._lock:
                    self._unacknowledged = None
            case control.Clock():
                self.clock = message.round
                self.swarm_tokens = message.swarm_tokens
                self.links = message.links
            case control.Stop():
                self.stop_asked.set()

    def _send_all(self, connection: socket.socket) -> None:
        with suppress(OSError):
            while (message := self._outbox.get()) is not None:
                connection.sendall(control.encode(message))
            connection.shutdown(socket.SHUT_RDWR)

    def _drop_outbox(self) -> None:
        """End the sender thread of a lost connection; what was queued for it is void."""
        with self._lock:
            self._drop_outbox_items()
            self._outbox.put_nowait(None)

    def _drop_outbox_items(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._outbox.get_nowait()
