"""`gossamer node`: keeps a daemon and a trainer running side by side.

A trainer that dies is restarted with backoff and resumes; a daemon that dies is restarted while the
trainer goes on alone. If this process dies, however, both end with it (see `lifeline`). A child that ends
with exit status 2 has told the person what to fix: then the node stops.
"""

import logging
import signal
import time

from gossamer.node import lifeline
from gossamer.node.options import DaemonOptions, TrainerOptions
from gossamer.node.service import daemon_service, trainer_service

STOP_S = 4.0
POLL_S = 0.1

log = logging.getLogger("gossamer.supervisor")


class Supervisor:
    """Runs one node until it is told to stop."""

    def __init__(self, daemon: DaemonOptions, trainer: TrainerOptions | None) -> None:
        self._asked_to_stop = False  # not an Event: the signal may interrupt code that holds its lock
        self._services = [daemon_service(daemon)]
        if trainer is not None:
            self._services.append(trainer_service(trainer))

    def stop(self) -> None:
        """Ask the node to stop; `run` returns within 5 seconds."""
        self._asked_to_stop = True

    def run(self) -> int:
        """Run until `stop`, a signal, or the end of a child that is not restarted; returns the exit
        status."""
        for number in lifeline.stop_signals():
            signal.signal(number, lambda *_: self.stop())
        lifeline.reset_signals()
        lifeline.watch(self.stop)
        status = 0
        try:
            while not self._asked_to_stop:
                ended = {
                    service.name: s
                    for service in self._services
                    if (s := service.keep_running(time.monotonic())) is not None
                }
                if ended:
                    status = max(ended.values())
                    if status == 0:  # we did not ask it to end, and it has logged nothing itself
                        names = " and the ".join(ended)
                        log.warning(
                            "the %s ended, though this node was not asked to stop; the node stops", names
                        )
                    break
                time.sleep(POLL_S)
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
