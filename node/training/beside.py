"""What runs beside a script that trains: its daemon, and an orderly end for both.

The daemon is started again with backoff when it dies, while training goes on alone. It ends with the script:
told to when the script leaves, and by its lifeline however the script died.

SIGTERM asks the training loop to stop instead of killing it in the middle of a step. It is taken over only
where nobody else has, and only once: a second one kills at once, as it always did.
"""

import logging
import os
import signal
import threading
import time
from contextlib import suppress

from gossamer.node.options import DaemonOptions
from gossamer.node.service import Service, daemon_service
from gossamer.protocol.errors import ConfigError

STOP_S = 4.0
POLL_S = 0.5
TERMINATED = 128 + signal.SIGTERM

log = logging.getLogger("gossamer.peer")


class Beside:
    """A script's daemon (where it has one) and its SIGTERM."""

    def __init__(self, options: DaemonOptions | None = None) -> None:
        """`options` are None in a script whose daemon runs beside another rank."""
        self._service: Service | None = daemon_service(options) if options else None
        self._ended: int | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_running, name="beside", daemon=True)
        self._pid = os.getpid()
        self._asked = False
        self._took_signal = False

    def start(self) -> None:
        """Start the daemon and listen for SIGTERM."""
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self._terminate)
                self._took_signal = True
        if self._service is not None:
            self._thread.start()

    @property
    def must_stop(self) -> bool:
        """Whether SIGTERM came, or the daemon is done and will not be started again."""
        return self._asked or self._ended is not None

    def ending(self) -> BaseException:
        """What to end a loop with that goes on although it must stop."""
        if self._ended:
            return ConfigError("the node's daemon gave up: its last line says why")
        return SystemExit(TERMINATED)

    def stop(self) -> None:
        """End the daemon, within `STOP_S`, and give SIGTERM back."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join()
        child = self._service.child if self._service else None
        if child is not None:
            child.terminate()
            child.end(STOP_S)
        self._give_signal_back()

    def _keep_running(self) -> None:
        assert self._service is not None
        while not self._closing.is_set() and self._ended is None:
            try:
                self._ended = self._service.keep_running(time.monotonic())
            except OSError as error:  # no memory for a process just now, say
                log.warning("cannot start the daemon: %s", error)
                self._closing.wait(10 * POLL_S)
            self._closing.wait(POLL_S)

    def _terminate(self, *_: object) -> None:
        self._give_signal_back()
        if os.getpid() == self._pid:
            self._asked = True
        else:  # a forked worker: nobody there looks at a flag
            signal.raise_signal(signal.SIGTERM)

    def _give_signal_back(self) -> None:
        if self._took_signal:
            with suppress(ValueError):  # not the main thread: whoever attached there is gone with it
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._took_signal = False
