"""The trainer's side of the connection to its daemon: a thread listens to it, so that training never waits.

The training thread reads plain attributes, and writes messages straight to the socket's buffer: waking a
second thread for each message would cost several times as much. If the daemon dies, training goes on alone;
the thread reconnects, and a delta that was not acknowledged is handed over again.
"""

import logging
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from gossamer.node.ipc import messages as control
from gossamer.node.ipc.messages import SharedMemory
from gossamer.protocol.errors import MalformedError
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.sampling import EVERY_ROUND

CONNECT_TIMEOUT_S = 60.0
"""How long a trainer waits for its daemon, which reads its model back before it accepts a trainer."""

RECONNECT_S = 0.5
LOG_AFTER_S = 30.0
"""How long the daemon must have been silent before that is logged."""

_AT_ONCE = socket.MSG_DONTWAIT | getattr(socket, "MSG_NOSIGNAL", 0)
"""MSG_NOSIGNAL is for scripts that restore SIGPIPE's default action: a daemon's death would end them."""

OUTDATED = (
    "the node's daemon runs a different release of Gossamer than this process, which loaded an earlier one"
)

log = logging.getLogger("gossamer.peer")


@dataclass(frozen=True, slots=True)
class Offer:
    """A fragment of Phi that the daemon has left in shared memory.

    The offer holds on to the shared memory. So if the daemon dies, its offer can still be read, and is never
    mistaken for memory of the next daemon.
    """

    fragment: int
    merged_round: int
    own_round: int
    version: int
    shared: SharedMemory


class DaemonLink:
    """What the daemon last said, and a way to answer. Thread-safe only where stated."""

    def __init__(self, path: str, manifest: Manifest) -> None:
        self._path = path
        self._manifest = manifest
        # Reentrant, since a signal handler may make the peer leave while the loop is anywhere in this class.
        # A single lock, since such a handler would take several in any order.
        self._lock = threading.RLock()
        self._connection: socket.socket | None = None
        """The connection on which we were welcomed. It is closed only after this is None again."""
        self._shared: SharedMemory | None = None
        self.is_attached = False
        """Whether the daemon of `_shared` still listens. A daemon that died is usually followed by another;
        until then `_shared` stays mapped."""
        self._offers: dict[int, Offer] = {}
        self._unacknowledged: tuple[control.Publish, memoryview] | None = None
        """The delta handed over last, until it is acknowledged. Its payload stays where it was written."""
        self._closing = threading.Event()
        self._connected = threading.Event()
        self.node_id = b""
        self.clock = 0
        self.codec = manifest.outer.codecs[0].name
        self.own_last = 0
        """The last round that the daemon has signed for us, or that we have handed over."""
        self.swarm_tokens = 0
        self.links = 0
        """Number of nodes that the daemon is linked to now."""
        self.unmerged = 0
        """Number of rounds that the daemon has still to merge."""
        self.window = 0
        """The steps in a window, where the swarm sets its pace and the daemon knows it; else 0."""
        self.turn = EVERY_ROUND
        """How often members contribute, see `sampling.is_drawn`."""
        self.taken = b""
        """Which blocks of the data are taken, see `data_claims.Taken`."""
        self.problem = "no answer yet"
        """Why the last attempt to reach the daemon failed, for the person who waits."""
        self.stop_asked = threading.Event()
        self.is_outdated = False
        """Whether the daemon is of another release: what is installed has changed since we began."""
        self._thread = threading.Thread(target=self._run, name="daemon-link", daemon=True)
        self._thread.start()

    # -- the training thread

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait for the first connection; returns whether there is one."""
        return self._connected.wait(timeout_s)

    @property
    def can_publish(self) -> bool:
        """Whether the payload area is ours: connected, and the last delta acknowledged."""
        return self.is_attached and self._unacknowledged is None

    @property
    def payload_area(self) -> memoryview:
        """Where to write the next payload once `can_publish`."""
        assert self._shared is not None
        return self._shared.payload

    def publish(self, message: control.Publish, area: memoryview) -> None:
        """Hand over the payload written to `area`, which was `payload_area` when the writing began.

        Since then the daemon may have died. The next daemon then gets the payload when it comes; or it is
        here already, with a payload area of its own, to which the payload is copied.
        """
        payload = area[: message.payload_bytes]
        with self._lock:
            self._unacknowledged = (message, payload)
            self.own_last = message.round
            if self.is_attached and self._shared is not None:
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
                self.send(control.Applied(offer.fragment))

    def send(self, message: control.ControlMessage) -> None:
        """Leave a message for the daemon, if there is one. Hangs up if that cannot be done: the daemon has
        stopped reading, or the system has no memory just now."""
        frame = control.encode(message)
        with self._lock, suppress(OSError):
            if self._connection is None:
                return
            with suppress(OSError):
                if self._connection.send(frame, _AT_ONCE) == len(frame):
                    return
            self._connection.shutdown(socket.SHUT_RDWR)

    def reconnect(self) -> None:
        """Hang up, and have the daemon welcome us and offer all of Phi again, in new memory. A delta that it
        has not acknowledged is handed over once more."""
        with self._lock, suppress(OSError):
            self.is_attached = False
            self._offers.clear()
            if self._connection is not None:
                self._connection.shutdown(socket.SHUT_RDWR)

    def wait_acknowledged(self, timeout_s: float, *, only_attached: bool = False) -> bool:
        """Wait until the last delta is durable with the daemon; on request, only while one is attached.
        Returns whether it is."""
        deadline = time.monotonic() + timeout_s
        while self._unacknowledged is not None and time.monotonic() < deadline:
            if only_attached and not self.is_attached:
                break
            time.sleep(0.01)
        return self._unacknowledged is None

    def close(self) -> None:
        """Disconnect. Messages already sent still arrive."""
        self._closing.set()
        with self._lock, suppress(OSError):
            if self._connection is not None:
                self._connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(2.0)

    # -- the background thread

    def _run(self) -> None:
        silent_since = inf
        while not self._closing.is_set():
            try:
                self._connect_and_listen()
            except OSError as error:
                self.problem = (error.strerror or str(error)).lower()
            except MemoryError:  # without this thread nothing would be published any more
                self.problem = "not enough memory"
            except MalformedError as error:
                self.problem = str(error)
                if not self.is_outdated:
                    log.error("%s: this process must be restarted", OUTDATED)
                self.is_outdated = True
                self.stop_asked.set()
            if self.is_attached:
                silent_since = time.monotonic()
            self.is_attached = False
            if time.monotonic() - silent_since > LOG_AFTER_S:
                silent_since = inf
                log.warning(
                    "the node's daemon has not answered for %.0f s (%s): work done meanwhile is published"
                    " once it does",
                    LOG_AFTER_S,
                    self.problem,
                )
            self._closing.wait(RECONNECT_S)

    def _connect_and_listen(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(None)  # whatever default the script has set: a daemon may be silent
            connection.connect(self._path)
            prefix, fds, _, _ = socket.recv_fds(connection, control.LENGTH_BYTES, 1)
            if not fds:  # one of us has no memory or files left just now, or the daemon has died
                raise ConnectionError("the daemon closed the connection")
            with connection.makefile("rb") as stream:
                with os.fdopen(fds[0], "rb") as file:
                    welcome = control.decode(control.receive_exactly(stream, control.frame_length(prefix)))
                    if not isinstance(welcome, control.Welcome):
                        raise MalformedError("the daemon did not welcome us")
                    shared = SharedMemory(self._manifest, os.dup(file.fileno()))
                shared.close()  # the mapping stays
                try:
                    self._begin(welcome, shared, connection)
                    while not self._closing.is_set():
                        self._handle(control.receive(stream), shared)
                finally:
                    with self._lock:
                        self._connection = None

    def _begin(self, welcome: control.Welcome, shared: SharedMemory, connection: socket.socket) -> None:
        with self._lock:
            self._connection = connection
            self._offers.clear()
            self.node_id = welcome.node_id
            self.clock = welcome.clock
            self.own_last = max(self.own_last, welcome.own_last)
            if (pending := self._unacknowledged) is not None:
                message, payload = pending
                if message.round <= welcome.acknowledged:
                    self._unacknowledged = None
                elif message.round > welcome.handed_in:  # else it is being stored
                    shared.payload[: len(payload)] = payload
                    self.send(message)
            self._shared = shared
            self.is_attached = True
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
                    pending = self._unacknowledged
                    if pending is not None and message.round >= pending[0].round:
                        self._unacknowledged = None  # else it was a delta of the trainer before us
            case control.Clock():
                self.clock = message.round
                self.swarm_tokens = message.swarm_tokens
                self.links = message.links
                self.unmerged = message.unmerged
                self.codec = message.codec or self.codec
                self.window, self.turn = message.window, message.turn
            case control.Data():
                self.taken = message.taken
            case control.Stop():
                self.stop_asked.set()
