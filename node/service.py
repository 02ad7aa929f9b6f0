"""A child process that should always run: started again with backoff when it dies.

A child that ends with exit status 0 or 2 is not restarted: it is done, or has told a person what to fix.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from gossamer.node import exit_status
from gossamer.node.lifeline import Child
from gossamer.node.options import DaemonOptions, TrainerOptions
from gossamer.protocol.backoff import Backoff

BACKOFF_MIN_S = 0.5
BACKOFF_MAX_S = 30.0
STEADY_AFTER_S = 60.0
"""A child that ran this long starts with a fresh backoff."""

log = logging.getLogger("gossamer.supervisor")


@dataclass(slots=True)
class Service:
    """One child that should always run."""

    name: str
    start: Callable[[], Child]
    child: Child | None = None
    backoff: Backoff | None = None
    """The wait after it last failed; None if it never has."""

    @property
    def has_failed(self) -> bool:
        """Whether it ever ended when it should not have, or could not be started."""
        return self.backoff is not None

    def keep_running(self, now: float) -> int | None:
        """Start it if it is time to; returns the exit status of a child that should not be restarted."""
        if self.child is None:
            if self.backoff is None or now >= self.backoff.until:
                self._try_to_start(now)
            return None
        status = self.child.poll()
        if status is None:
            return None
        self.child.close()
        self.child = None
        if status in (exit_status.DONE, exit_status.USER_ERROR):
            return status
        self._try_later(now, f"{_ended(self.name)}{status}); starting it again")
        return None

    def _try_to_start(self, now: float) -> None:
        try:
            self.child = self.start()
        except OSError as error:  # no memory, no more processes or files: it may pass
            self._try_later(now, f"cannot start the {self.name} ({error.strerror}); trying again")

    def _try_later(self, now: float, text: str) -> None:
        self.backoff = Backoff.after(self.backoff, now, BACKOFF_MIN_S, BACKOFF_MAX_S, STEADY_AFTER_S)
        log.warning("%s in %.1f s", text, self.backoff.wait)


def says_it_ended(text: str, name: str) -> bool:
    """Whether this is the log line for a child that has ended and is started again."""
    return text.startswith(_ended(name))


def _ended(name: str) -> str:
    return f"the {name} ended (status "


def daemon_service(options: DaemonOptions) -> Service:
    """The service that runs a daemon."""

    def start() -> Child:
        env = {
            # The daemon sums pieces that fit in cache: BLAS threads would spend their time waiting.
            "OPENBLAS_NUM_THREADS": "1",
            # With one heap per thread, glibc keeps the memory that each of them has freed, and the process
            # grows for thousands of rounds: a fifth more memory than with a single heap.
            "MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "1"),
        }
        return Child("gossamer.node.daemon", [options.to_json()], env=env)

    return Service("daemon", start)


def trainer_service(options: TrainerOptions) -> Service:
    """The service that runs a trainer. A restarted one is told so, see `TrainerOptions.restarted`."""
    threads = {"OMP_NUM_THREADS": str(options.threads)} if options.threads else {}

    def start() -> Child:
        told = replace(options, restarted=service.has_failed)
        return Child("gossamer.node.trainer", [told.to_json()], env=threads)

    service = Service("trainer", start)
    return service
