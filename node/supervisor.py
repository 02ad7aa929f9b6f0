"""`gossamer node`: keeps a daemon and a trainer running side by side.

A trainer that dies is restarted with backoff and resumes; a daemon that dies is restarted while the
trainer goes on alone. If this process dies, however, both end with it (see `lifeline`). A child that ends
with exit status 2 has told the person what to mend: then the node stops.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gossamer.node import lifeline
from gossamer.node.address import parse_address
from gossamer.node.home import Home
from gossamer.node.lifeline import Child
from gossamer.node.options import DaemonOptions, TrainerOptions

BACKOFF_MAX_S = 30.0
STEADY_AFTER_S = 60.0
"""A child that ran this long starts with a fresh backoff."""

STOP_S = 4.0
POLL_S = 0.1
USER_ERROR = 2

log = logging.getLogger("gossamer.supervisor")


@dataclass(slots=True)
class _Service:
    """One child that should always run."""

    name: str
    start: Callable[[], Child]
    child: Child | None = None
    started: float = 0.0
    failures: int = 0
    restart_at: float = field(default=0.0)

    def keep_running(self, now: float) -> int | None:
        """Start it if it is time to; returns the exit status of a child that should not be restarted."""
        if self.child is None:
            if now >= self.restart_at:
                self.child = self.start()
                self.started = now
            return None
        status = self.child.poll()
        if status is None:
            return None
        self.child.close()
        self.child = None
        if status in (0, USER_ERROR):
            return status
        self.failures = 1 if now - self.started > STEADY_AFTER_S else self.failures + 1
        pause = min(BACKOFF_MAX_S, 0.5 * 2 ** (self.failures - 1))
        self.restart_at = now + pause
        log.warning("the %s ended (status %d); starting it again in %.1f s", self.name, status, pause)
        return None


class Supervisor:
    """Runs one node until it is told to stop."""

    def __init__(self, daemon: DaemonOptions, trainer: TrainerOptions | None) -> None:
        self._home = Home(daemon.folder)
        self._daemon_options = daemon
        self._stop = threading.Event()
        self._services = [_Service("daemon", self._start_daemon)]
        if trainer is not None:
            threads = {"OMP_NUM_THREADS": str(trainer.threads)} if trainer.threads else {}
            self._services.append(
                _Service("trainer", lambda: Child("gossamer.node.trainer", [trainer.to_json()], env=threads))
            )

    def _start_daemon(self) -> Child:
        """A restarted daemon asks for the port it had, so that peers find it where they left it."""
        options = self._daemon_options
        known = self._home.read_daemon()
        host, port = parse_address(options.listen, port_min=0)
        if known is not None and port == 0 and self._services[0].failures == 1:
            options = replace(options, listen=f"{host}:{parse_address(str(known['address']))[1]}")
        # The daemon sums pieces that fit in cache: a BLAS that spreads them over threads would only wait.
        return Child("gossamer.node.daemon", [options.to_json()], env={"OPENBLAS_NUM_THREADS": "1"})

    def stop(self) -> None:
        """Ask the node to stop; `run` returns within 5 seconds."""
        self._stop.set()

    def run(self) -> int:
        """Run until `stop`, a signal, or an error that a person must mend; returns the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self.stop())
        lifeline.watch(self.stop)
        status = 0
        try:
            while not self._stop.is_set():
                ended = [
                    s
                    for service in self._services
                    if (s := service.keep_running(time.monotonic())) is not None
                ]
                if ended:
                    status = max(ended)
                    break
                self._stop.wait(POLL_S)
        finally:
            self._end_all()
        return status

    def _end_all(self) -> None:
        children = [service.child for service in self._services if service.child is not None]
        for child in children:
            child.terminate()
        deadline = time.monotonic() + STOP_S
        for child in reversed(children):
            child.end(max(0.1, deadline - time.monotonic()))
