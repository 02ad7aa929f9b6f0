"""What runs beside a script that trains: its daemon, and an orderly end for both.

A daemon that dies is started again with backoff, while training goes on alone. It ends with the script: it is
told to when the script leaves, and its lifeline ends it however the script died.

SIGTERM asks the training loops of this process to stop, instead of killing them in the middle of a step. It
is handled only if no other handler is set, and only once: a second SIGTERM kills at once, as it always did.
"""

import logging
import os
import signal
import threading
import time
from contextlib import suppress

from gossamer.node.options import NodeOptions
from gossamer.node.processes import Service, daemon_service
from gossamer.protocol.errors import ConfigError

STOP_S = 4.0
POLL_S = 0.5
TERMINATED = 128 + signal.SIGTERM

log = logging.getLogger("gossamer.peer")

_listening: "set[Beside]" = set()
"""Those that SIGTERM asks to stop."""


def _terminate(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    asked = [beside for beside in tuple(_listening) if beside.is_here]
    for beside in asked:
        beside.ask()
    if not asked:  # a forked worker, in which nothing looks at the flag
        signal.raise_signal(signal.SIGTERM)


class Beside:
    """A script's daemon, if it has one, and its handling of SIGTERM."""

    def __init__(self, options: NodeOptions | None = None) -> None:
        """`options` are None in a script whose daemon runs beside another rank."""
        self._service: Service | None = daemon_service(options) if options else None
        self._ended: int | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_running, name="beside", daemon=True)
        self._pid = os.getpid()
        self._asked = False

    def start(self) -> None:
        """Start the daemon and listen for SIGTERM."""
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, _terminate)
        elif signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            log.warning(
                "attached outside the main thread, where SIGTERM cannot be handled: it would end the script"
                " in the middle of a step. Have a SIGTERM handler call request_stop()"
            )
        if signal.getsignal(signal.SIGTERM) is _terminate:
            _listening.add(self)
        if self._service is not None:
            self._thread.start()

    @property
    def is_here(self) -> bool:
        """Whether this is the process in which it was made, and not one forked from it."""
        return os.getpid() == self._pid

    def ask(self) -> None:
        """Ask the training loop to stop."""
        self._asked = True

    @property
    def was_terminated(self) -> bool:
        """Whether SIGTERM came."""
        return self._asked

    @property
    def must_stop(self) -> bool:
        """Whether SIGTERM came, or the daemon is done and will not be started again."""
        return self._asked or self._ended is not None

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
        """End the daemon, within `STOP_S`, and restore SIGTERM.

        If Ctrl-C cuts the wait short, the daemon ends all the same.
        """
        try:
            self._closing.set()
            if self._thread.ident is not None:
                self._thread.join()
        finally:
            self._give_signal_back()

    def _keep_running(self) -> None:
        assert self._service is not None
        try:
            while not self._closing.is_set() and self._ended is None:
                try:
                    self._ended = self._service.keep_running(time.monotonic())
                except OSError as error:  # such as no memory for a process just now
                    log.warning("cannot start the daemon: %s", error)
                    self._closing.wait(10 * POLL_S)
                self._closing.wait(POLL_S)
        finally:  # in this thread, which no signal interrupts
            child = self._service.child
            if child is not None:
                child.terminate()
                child.end(STOP_S)

    def _give_signal_back(self) -> None:
        _listening.discard(self)
        if not _listening and signal.getsignal(signal.SIGTERM) is _terminate:
            with suppress(ValueError):  # not the main thread: SIGTERM kills all the same, as nothing listens
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
