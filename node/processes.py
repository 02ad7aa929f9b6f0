"""No orphans: a child process ends when its parent does, however the parent died.

The parent keeps the write end of a pipe and hands the read end to the child. When the parent ends, even by
kill -9, the kernel closes the write end, and the child reads end-of-file. This works on every Unix. Other
processes that the parent forks (a DataLoader's workers, say) close the write end at once, so that only the
parent holds it.
"""

import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from gossamer.node.options import NodeOptions
from gossamer.protocol.backoff import Backoff

# --- The exit statuses of our processes, for whatever started them: the supervisor, systemd, a script.

DONE = 0

FAILED = 1
"""The next attempt may succeed: the disk is full, a file is out of reach, or there is a bug of ours."""

USER_ERROR = 2
"""A person has to fix something first: the next attempt would end in the same way."""

INTERRUPTED = 130
"""Ctrl-C: 128 plus the number of SIGINT, as in shells."""

_VARIABLE = "GOSSAMER_LIFELINE_FD"
_STDERR = 2

POLL_S = 0.02

STATUS_LOST = 1
"""Stands for the exit status of a child that ended when nobody can tell how. It counts as a failure, so that
the child is started again. A script that ignores SIGCHLD, or reaps every child, loses the real status."""

_children: "weakref.WeakSet[Child]" = weakref.WeakSet()


def _forked() -> None:
    for child in list(_children):
        child.close()


os.register_at_fork(after_in_child=_forked)


def _open_standard_streams() -> None:
    """If they are closed (``<&-``), the next file opened, such as a lifeline, would get one's number."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(opened, True)
    os.close(opened)


class Child:
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
        _open_standard_streams()
        given = {**os.environ, **(env or {})}
        given.pop("PYTHONINSPECT", None)  # with it, a child ends with a traceback, and always with status 0
        read_end, self._write_end = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *args],
                pass_fds=[read_end],
                env={**given, _VARIABLE: str(read_end)},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._write_end)
            raise
        finally:
            os.close(read_end)
        _children.add(self)

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        """Exit status, or None while it runs; STATUS_LOST if other code in this process has reaped it.

        `Popen.poll` would return 0 in that case, as if the child had ended in good order.
        """
        if self.process.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self.process.returncode = STATUS_LOST
            else:
                self.process.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.process.returncode

    def terminate(self) -> None:
        """Ask it to stop (SIGTERM)."""
        if self.poll() is None:
            self.process.terminate()

    def end(self, grace_s: float) -> int:
        """Wait `grace_s` for it to end, then kill it and its own children; returns its exit status."""
        deadline = time.monotonic() + grace_s
        try:
            while (status := self.poll()) is None:
                if time.monotonic() > deadline:
                    self._kill()
                time.sleep(POLL_S)
            return status
        finally:
            self.close()

    def _kill(self) -> None:
        # The whole session, which is the child's own: a DataLoader's worker that has not yet begun to watch
        # its parent when that ends would stay for ever.
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()

    def close(self) -> None:
        """Close the lifeline, which tells a child that still runs to end."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1


def end_within(seconds: float, status: int) -> None:
    """Make this process end, with this exit status, even if one of its threads does not.

    Python waits for threads that are not daemon threads. One that waits for more work would keep the process
    of a trainer alive that is done or has failed, so that it would never be started again.
    """

    def end() -> None:
        time.sleep(seconds)
        os._exit(status)

    threading.Thread(target=end, name="end", daemon=True).start()


def stop_signals() -> list[signal.Signals]:
    """The signals that ask for an orderly stop: those of Ctrl-C, of `kill`, and of a terminal that closes.

    The last is left out if it is ignored already, as under nohup.
    """
    asked = [signal.SIGINT, signal.SIGTERM]
    return asked if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*asked, signal.SIGHUP]


def reset_signals() -> None:
    """Undo signal settings that a child inherits from its parent.

    If the parent blocks SIGTERM to wait for it (`signal.sigwait`), the child could not be asked to stop. If
    it ignores SIGCHLD, the child would never hear how its own children end.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])


def watch(on_cut: Callable[[], None]) -> None:
    """Call `on_cut` from a background thread once the parent is gone. Does nothing without a lifeline."""
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


# --- How a child process of `multiprocessing` ends, for a peer that leaves at its end.
#
# Up to Python 3.12, finalizers run while the error that ends the process is at hand. From 3.13 on, they run
# when that error has been printed and forgotten, and the exit status is the same for an error and for
# ``sys.exit(1)``. Only the printing can be observed.

_errors: list[BaseException | None] = []
_print_exc = traceback.print_exc


def watch_child_end() -> None:
    """Take note of the error that will end this child process."""
    traceback.print_exc = _note_and_print


def _note_and_print(*args: Any, **options: Any) -> None:
    # Only what multiprocessing prints: a script may print errors itself, and go on.
    if sys._getframe(1).f_code is BaseProcess._bootstrap.__code__:  # type: ignore[attr-defined]
        _errors.append(sys.exc_info()[1])
    _print_exc(*args, **options)


def error() -> BaseException | None:
    """The error that has ended this process; None if there was none, or if it was told to exit."""
    return _errors[-1] if _errors else None


# --- A child process that should always run: started again with backoff when it dies.
#
# A child that ends with exit status 0 or 2 is not restarted: it is done, or has told a person what to fix.

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
        if status in (DONE, USER_ERROR):
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


def daemon_service(options: NodeOptions) -> Service:
    """The service that runs a daemon."""

    def start() -> Child:
        env = {
            # The daemon sums pieces that fit in cache: BLAS threads would spend their time waiting.
            "OPENBLAS_NUM_THREADS": "1",
            # With one heap per thread, glibc keeps the memory that each of them has freed, and the process
            # grows for thousands of rounds: a fifth more memory than with a single heap.
            "MALLOC_ARENA_MAX": os.environ.get("MALLOC_ARENA_MAX", "1"),
        }
        return Child("gossamer.node.daemon.daemon", [options.to_json()], env=env)

    return Service("daemon", start)


def trainer_service(options: NodeOptions) -> Service:
    """The service that runs a trainer. A restarted one is told so, see `NodeOptions.restarted`."""
    threads = {"OMP_NUM_THREADS": str(options.threads)} if options.threads else {}

    def start() -> Child:
        told = options.model_copy(update={"restarted": service.has_failed})
        return Child("gossamer.node.trainer.trainer", [told.to_json()], env=threads)

    service = Service("trainer", start)
    return service


def services_of(options: NodeOptions) -> list[Service]:
    """All that a node consists of."""
    return [daemon_service(options), *([] if options.observe else [trainer_service(options)])]


def check(options: NodeOptions) -> int:
    """Start a node's processes one after the other, each up to where it would begin its work (the daemon has
    restored its state and listens, the trainer has its first batch); returns the exit status of the first
    that cannot."""
    for service in services_of(options):
        if status := service.start().end(math.inf):
            return status
    return DONE


# --- `gossamer node`: keeps a daemon and a trainer running side by side.
#
# A trainer that dies is restarted with backoff and resumes; a daemon that dies is restarted while the
# trainer goes on alone. If this process dies, however, both end with it (see `lifeline`). A child that ends
# with exit status 2 has told the person what to fix: then the node stops.

STOP_S = 4.0
SUPERVISOR_POLL_S = 0.1


class Supervisor:
    """Runs one node until it is told to stop."""

    def __init__(self, options: NodeOptions) -> None:
        self._asked_to_stop = False  # not an Event: the signal may interrupt code that holds its lock
        self._services = services_of(options)

    def stop(self) -> None:
        """Ask the node to stop; `run` returns within 5 seconds."""
        self._asked_to_stop = True

    def run(self) -> int:
        """Run until `stop`, a signal, or the end of a child that is not restarted; returns the exit
        status."""
        for number in stop_signals():
            signal.signal(number, lambda *_: self.stop())
        reset_signals()
        watch(self.stop)
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
                time.sleep(SUPERVISOR_POLL_S)
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
