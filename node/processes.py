"""Child processes: no orphans, started again when they die, and all ended within five seconds.

The parent keeps the write end of a pipe, the *lifeline*, and hands the read end to the child. When the parent
ends, even by kill -9, the kernel closes the write end, and the child reads end-of-file. This works on every
Unix. Other processes that the parent forks (a DataLoader's workers, say) close the write end at once, so that
only the parent holds it.

`gossamer node` is a `Supervisor` of two services, the daemon and the trainer. One that dies is started again
with backoff, while the other goes on. One that ends with exit status 0 or 2 is not: it is done, or has told a
person what to fix. Then the node stops.
"""

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from gossamer.node.options import NodeOptions

# The exit statuses of our processes, for whatever started them: the supervisor, systemd, a script.

DONE = 0

FAILED = 1
"""The next attempt may succeed: the disk is full, a file is out of reach, or there is a bug of ours."""

USER_ERROR = 2
"""A person has to fix something first: the next attempt would end in the same way."""

INTERRUPTED = 130
"""Ctrl-C: 128 plus the number of SIGINT, as in shells."""

STOP_S = 4.0
"""Children that have not ended by then are killed, unless `--stop-within` gives them longer."""

BACKOFF_MIN_S = 0.5
BACKOFF_MAX_S = 30.0
STEADY_AFTER_S = 60.0
"""A child that ran this long starts with a fresh backoff."""

POLL_S = 0.1

ENDED = "the %s ended (status "
"""How the log line begins for a child of this name that has ended and is started again."""

_VARIABLE = "GOSSAMER_LIFELINE_FD"

log = logging.getLogger("gossamer.supervisor")

_children: "weakref.WeakSet[Child]" = weakref.WeakSet()


def _forked() -> None:
    for child in list(_children):
        child.close()


os.register_at_fork(after_in_child=_forked)


class Child(subprocess.Popen[bytes]):
    """A child process tied to this one by a lifeline."""

    def __init__(
        self,
        module: str,
        args: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> None:
        """Start ``python -m module args``. Raises OSError if it cannot be started."""
        read_end, self._write_end = os.pipe()
        try:
            super().__init__(
                [sys.executable, "-P", "-m", module, *args],
                pass_fds=[read_end],
                env={**os.environ, **(env or {}), _VARIABLE: str(read_end)},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        except BaseException:
            self.close()
            raise
        finally:
            os.close(read_end)
        _children.add(self)

    def end(self, grace_s: float) -> int:
        """Wait `grace_s` for it to end, then kill it and its own children; returns its exit status."""
        try:
            return self.wait(grace_s)
        except subprocess.TimeoutExpired:
            # The whole session, which is the child's own: a DataLoader's worker that has not yet begun to
            # watch its parent when that ends would stay for ever.
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGKILL)
            return self.wait()
        finally:
            self.close()

    def close(self) -> None:
        """Close the lifeline, which tells a child that still runs to end."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1


def watch(on_cut: Callable[[], None]) -> None:
    """In a child: call `on_cut` from a background thread once the parent is gone. Does nothing without a
    lifeline."""
    value = os.environ.pop(_VARIABLE, None)
    if value is None:
        return
    fd = int(value)
    os.set_inheritable(fd, False)

    def wait_for_end() -> None:
        while os.read(fd, 1):
            pass
        on_cut()

    threading.Thread(target=wait_for_end, name="lifeline", daemon=True).start()


def end_within(seconds: float, status: int) -> None:
    """Make this process end, with this exit status, even if one of its threads does not: Python waits for
    threads that are not daemon threads."""

    def end() -> None:
        time.sleep(seconds)
        os._exit(status)

    threading.Thread(target=end, name="end", daemon=True).start()


def stop_signals() -> list[signal.Signals]:
    """The signals that ask for an orderly stop: those of Ctrl-C, of `kill`, and of a terminal that closes
    (unless that is ignored already, as under nohup)."""
    asked = [signal.SIGINT, signal.SIGTERM]
    return asked if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*asked, signal.SIGHUP]


def reset_signals() -> None:
    """Undo signal settings that a child inherits: with SIGTERM blocked (`signal.sigwait`) it could not be
    asked to stop, and with SIGCHLD ignored it would never learn how its own children end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])


@dataclass(slots=True)
class Service:
    """One child that should always run."""

    name: str
    start: Callable[[], Child]
    child: Child | None = None
    wait_s: float = 0.0
    """The wait after it last failed; 0 if it never has."""
    until: float = 0.0
    """When that wait is over."""

    @property
    def has_failed(self) -> bool:
        """Whether it ever ended when it should not have, or could not be started."""
        return self.wait_s > 0

    def keep_running(self, now: float) -> int | None:
        """Start it if it is time to; returns the exit status of a child that should not be restarted."""
        if self.child is None:
            if now >= self.until:
                try:
                    self.child = self.start()
                except OSError as error:  # no memory, no more processes or files: it may pass
                    self._try_later(now, f"cannot start the {self.name} ({error.strerror}); trying again")
            return None
        status = self.child.poll()
        if status is None:
            return None
        self.child.close()
        self.child = None
        if status in (DONE, USER_ERROR):
            return status
        hint = ", perhaps killed for want of memory" if status == -signal.SIGKILL else ""
        self._try_later(now, f"{ENDED % self.name}{status}){hint}; starting it again")
        return None

    def _try_later(self, now: float, text: str) -> None:
        was_steady = now >= self.until + STEADY_AFTER_S
        self.wait_s = BACKOFF_MIN_S if was_steady else min(max(BACKOFF_MIN_S, 2 * self.wait_s), BACKOFF_MAX_S)
        self.until = now + self.wait_s
        log.warning("%s in %.1f s", text, self.wait_s)


def start_daemon(options: NodeOptions, stderr: int | None = None) -> Child:
    """Start a node's daemon. Raises OSError if it cannot be started."""
    env = {
        # With one heap per thread, glibc keeps the memory that each of them has freed, and the process
        # grows for thousands of rounds: a fifth more memory than with a single heap.
        "MALLOC_ARENA_MAX": "1",
        # Otherwise glibc returns the arrays of every merge to the system, which zeroes each page that it
        # hands out again: more than half of what merging a small model takes.
        "MALLOC_MMAP_THRESHOLD_": str(8 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
        **os.environ,
        # The daemon sums pieces that fit in cache: BLAS threads would spend their time waiting.
        "OPENBLAS_NUM_THREADS": "1",
    }
    return Child("gossamer.node.daemon.daemon", [options.model_dump_json()], env=env, stderr=stderr)


def daemon_service(options: NodeOptions) -> Service:
    """The service that runs a daemon."""
    return Service("daemon", partial(start_daemon, options))


def services_of(options: NodeOptions) -> list[Service]:
    """All that a node consists of."""
    threads = {"OMP_NUM_THREADS": str(options.threads)} if options.threads else {}

    def start() -> Child:
        now = options.model_copy(update={"restarted": trainer.has_failed})
        return Child("gossamer.node.trainer.trainer", [now.model_dump_json()], env=threads)

    trainer = Service("trainer", start)
    return [daemon_service(options), *([] if options.observe else [trainer])]


def check(options: NodeOptions) -> int:
    """Start a node's processes one after the other, each up to where it would begin its work; returns the
    exit status of the first that cannot."""
    for service in services_of(options):
        if status := service.start().end(math.inf):
            return status
    return DONE


class Supervisor:
    """Runs one node until it is told to stop."""

    def __init__(self, options: NodeOptions) -> None:
        self._asked_to_stop = False  # not an Event: the signal may interrupt code that holds its lock
        self._stop_s = STOP_S + options.extra_stop_s
        self._services = services_of(options)

    def stop(self) -> None:
        """Ask the node to stop; `run` returns within `NodeOptions.stop_within`, usually 5 seconds."""
        self._asked_to_stop = True

    def run(self) -> int:
        """Run until `stop`, a signal, or the end of a child that is not restarted; returns the status."""
        for number in stop_signals():
            signal.signal(number, lambda *_: self.stop())
        reset_signals()
        watch(self.stop)
        try:
            while not self._asked_to_stop:
                statuses = {each.name: each.keep_running(time.monotonic()) for each in self._services}
                ended = {name: status for name, status in statuses.items() if status is not None}
                if ended:
                    if not any(ended.values()):  # it has logged nothing itself
                        names = " and the ".join(ended)
                        log.warning("the %s ended unasked; the node stops", names)
                    return max(ended.values())
                time.sleep(POLL_S)
            return DONE
        finally:
            children = [service.child for service in self._services if service.child is not None]
            for child in children:
                child.terminate()
            deadline = time.monotonic() + self._stop_s
            for child in reversed(children):
                child.end(max(0.1, deadline - time.monotonic()))
