"""A script becomes a node: it enters a folder, founds the swarm if it is the first, and starts a daemon.

The daemon is a child of the script. One that dies is started again with backoff, while training goes on
alone. It ends with the script: it is asked to when the script leaves, and its lifeline ends it however the
script died.

SIGTERM has the training loops of this process publish what they hold, and asks them to stop, instead of
killing them in the middle of a step: but only once, and a second one kills at once, as it always did. A
script's own handler is called after ours, and then it alone decides whether to stop.
"""

import logging
import multiprocessing
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from types import FrameType
from typing import Any

from torch import Tensor

from gossamer.node import logs
from gossamer.node.daemon.phi.restore import has_model
from gossamer.node.home import Home
from gossamer.node.inputs import expanded, read_manifest
from gossamer.node.join import enter
from gossamer.node.options import NodeOptions
from gossamer.node.processes import Service, daemon_service
from gossamer.node.trainer import genesis
from gossamer.node.trainer.daemon_link import CONNECT_TIMEOUT_S, OUTDATED, DaemonLink
from gossamer.node.trainer.parameters import check_fits
from gossamer.protocol.errors import ConfigError, StorageError, UnreachableError
from gossamer.protocol.manifest import Manifest

FREE_TIMEOUT_S = 8.0
"""How long to wait for the daemon of a script that has just ended or been killed."""

POLL_S = 0.1
LOG_AFTER_S = 15.0
"""When to log what is waited for."""

DAEMON_POLL_S = 0.5
STOP_S = 4.0
TERMINATED = 128 + signal.SIGTERM

log = logging.getLogger("gossamer.peer")

_imported_in = os.getpid()


# --- SIGTERM.


class Sigterm:
    """How this process handles SIGTERM: it calls the callbacks, and then whatever handled SIGTERM before."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self._before: Any = signal.SIG_DFL
        os.register_at_fork(after_in_child=self._callbacks.clear)

    @property
    def is_default(self) -> bool:
        """Whether the script has no handler of its own."""
        return self._before is signal.SIG_DFL

    def call(self, callback: Callable[[], None]) -> None:
        """Call a function at SIGTERM, in the main thread."""
        handler = signal.getsignal(signal.SIGTERM)
        if threading.current_thread() is not threading.main_thread():
            if handler is signal.SIG_DFL:
                log.warning(
                    "attached outside the main thread, where SIGTERM cannot be handled: it would end the"
                    " script in the middle of a step. Have a SIGTERM handler call request_stop()"
                )
        elif handler not in (signal.SIG_IGN, None, self._handle):
            self._before = handler
            signal.signal(signal.SIGTERM, self._handle)
        self._callbacks.append(callback)

    def forget(self, callback: Callable[[], None]) -> None:
        """Call a function no more. After the last, SIGTERM is handled as before."""
        if callback in self._callbacks:
            self._callbacks.remove(callback)
        if not self._callbacks and signal.getsignal(signal.SIGTERM) == self._handle:
            with suppress(ValueError):  # not the main thread: the handler of before is called all the same
                signal.signal(signal.SIGTERM, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        callbacks = tuple(self._callbacks)
        for callback in callbacks:
            callback()
        if not self.is_default:
            self._before(number, frame)
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not callbacks:  # a forked worker, in which no loop would stop
            signal.raise_signal(signal.SIGTERM)


sigterm = Sigterm()


# --- The daemon of a script.


class DaemonProcess:
    """A script's daemon, kept running by a thread, and whether SIGTERM asks the script to stop."""

    def __init__(self, options: NodeOptions | None = None) -> None:
        """`options` are None in a script whose daemon is a child of another rank."""
        self._service: Service | None = daemon_service(options) if options else None
        self._ended: int | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_running, name="daemon-process", daemon=True)
        self.must_stop = False
        """Whether SIGTERM came, or the daemon is done and will not be started again."""

    def start(self) -> None:
        """Start the daemon, and take over SIGTERM."""
        sigterm.call(self._terminated)
        if self._service is not None:
            self._thread.start()

    def _terminated(self) -> None:
        self.must_stop = self.must_stop or sigterm.is_default  # a script that handles SIGTERM itself decides

    @property
    def has_died(self) -> bool:
        """Whether the daemon ended when it should not have; another may run by now."""
        return self._service is not None and self._service.has_failed

    def ending(self) -> BaseException:
        """The exception for a loop that goes on although it must stop."""
        if self._ended:
            return ConfigError("the node's daemon gave up: its last line says why")
        return SystemExit(TERMINATED)

    def stop(self) -> None:
        """End the daemon, within `STOP_S`, and put SIGTERM back.

        If Ctrl-C cuts the wait short, the daemon ends all the same.
        """
        try:
            self._closing.set()
            if self._thread.ident is not None:
                self._thread.join()
        finally:
            sigterm.forget(self._terminated)

    def _keep_running(self) -> None:
        assert self._service is not None
        try:
            while not self._closing.is_set() and self._ended is None:
                self._ended = self._service.keep_running(time.monotonic())
                self.must_stop = self.must_stop or self._ended is not None
                self._closing.wait(DAEMON_POLL_S)
        finally:  # in this thread, which no signal interrupts
            child = self._service.child
            if child is not None:
                child.terminate()
                child.end(STOP_S)


# --- Starting a node.


@dataclass(frozen=True, slots=True)
class StartedNode:
    """A node whose daemon listens."""

    home: Home
    manifest: Manifest
    options: NodeOptions
    daemon: DaemonProcess
    link: DaemonLink

    @property
    def contact(self) -> str:
        """Where others join it: the first that it advertises, or else the one on this machine."""
        here = (self.home.read_daemon() or {}).get("address", "")
        address = self.options.advertise[0] if self.options.advertise else here
        return f"gossamer://{self.link.node_id.hex()}@{address}"

    def waits_for(self) -> str:
        """What this node does until it has the swarm's model, for the person who waits."""
        if self.link.links:
            return f"linked to {self.link.links} nodes, fetching what they have"
        joins = ", ".join(self.options.join)
        return f"no link yet to {joins}" if joins else "the daemon reads it from the folder"

    def close(self) -> None:
        """Disconnect from the daemon, and stop it."""
        try:
            self.link.close()
        finally:
            self.daemon.stop()


def start_node(
    options: NodeOptions,
    manifest: Manifest | str | os.PathLike[str] | None,
    tensors: Mapping[str, Tensor],
    in_full: Callable[[Manifest], Mapping[str, Tensor]],
) -> StartedNode:
    """Start the node of a script that trains these parameters. Raises LocalError.

    `in_full` takes the swarm's manifest, and returns the parameters whole, gathered from all ranks.
    """
    home, joins = entered(options, manifest)
    known = home.own_manifest()
    check_fits(tensors, known)
    deadline = time.monotonic() + FREE_TIMEOUT_S
    while not home.is_free():
        if time.monotonic() > deadline:
            raise _in_use(home)
        time.sleep(POLL_S)
    whole = in_full(known)
    if not (joins or home.read_peers() or has_model(home, known)):
        genesis.found(known, genesis.image(whole, known.plan()), home)
        log.info("founding swarm %s (%s)", known.swarm.name, known.swarm_id.hex()[:12])
    # Each attach has its own socket, so that two scripts started at once cannot meet each other's daemon.
    options = options.model_copy(
        update={
            "folder": home.root,
            "join": joins,
            "socket": home.socket_path(secrets.token_hex(4)),
            "log_level": logs.level_of(logging.getLogger("gossamer")),
        }
    )
    daemon = DaemonProcess(options)
    try:
        daemon.start()
        return StartedNode(home, known, options, daemon, _connected(options.socket, known, daemon))
    except BaseException as error:
        daemon.stop()
        if isinstance(error, ConfigError) and not home.is_free():  # another node took it meanwhile
            raise _in_use(home) from None
        raise


def check_process() -> None:
    """Raise ConfigError in a process that cannot be a node."""
    # A spawned worker runs its parent's script to define the functions in it.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "this is a worker (of a DataLoader, say) that imports its parent's script, and would be another"
            ' node: put what only the script itself should do under if __name__ == "__main__":'
        )
    if os.getpid() != _imported_in:
        raise ConfigError(
            "this process was forked from one that had loaded torch, whose threads it lacks: start it with"
            " multiprocessing's method 'spawn'"
        )


def _read(manifest: Manifest | str | os.PathLike[str] | None) -> Manifest | None:
    if manifest is None or isinstance(manifest, Manifest):
        return manifest
    if not isinstance(manifest, str | os.PathLike) or not str(manifest):
        raise ConfigError(f"manifest is {manifest!r:.60}: give a TOML file's path, or a Manifest")
    return read_manifest(expanded(manifest))


def entered(
    options: NodeOptions, manifest: Manifest | str | os.PathLike[str] | None
) -> tuple[Home, tuple[str, ...]]:
    """The node's folder, with its manifest in it, and whom it joins. Raises LocalError."""
    given = _read(manifest)
    result: Future[tuple[Home, tuple[str, ...]]] = Future()

    def run() -> None:
        try:
            result.set_result(enter(options, given))
        except BaseException as error:
            result.set_exception(error)

    # In its own thread, since a notebook's thread already runs an event loop. Ctrl-C does not wait for it.
    threading.Thread(target=run, name="entering", daemon=True).start()
    return result.result()


def _in_use(home: Home) -> StorageError:
    return StorageError(
        f"another node is running in {home.root}: stop it (leave() it, if it is this script's own), or give"
        " another folder="
    )


def _connected(socket: str, manifest: Manifest, daemon: DaemonProcess) -> DaemonLink:
    """A link to a daemon that listens. Waits without a limit while the daemon reads the node's model back;
    once a daemon has died, it and its successors get `CONNECT_TIMEOUT_S`.

    Raises ConfigError if it gives up, or UnreachableError.
    """
    link = DaemonLink(socket, manifest)
    log_at = time.monotonic() + LOG_AFTER_S
    gives_up_at = inf
    try:
        while not link.wait_connected(POLL_S):
            if daemon.must_stop:
                raise daemon.ending()
            if link.is_outdated:
                raise ConfigError(f"{OUTDATED}: start this script again")
            now = time.monotonic()
            if daemon.has_died:
                gives_up_at = min(gives_up_at, now + CONNECT_TIMEOUT_S)
            if now > gives_up_at:
                raise UnreachableError("the node's daemon keeps ending before it listens: its lines say why")
            if now > log_at:
                log_at = inf
                log.info("waiting for the node's daemon, which reads its model back (%s)", link.problem)
    except BaseException:
        link.close()
        raise
    return link
