"""No orphans: a child process ends when its parent does, however the parent died.

The parent keeps the write end of a pipe and hands the read end to the child. When the parent ends, even by
kill -9, the kernel closes the write end, and the child reads end-of-file. This works on every Unix. Other
processes that the parent forks (a DataLoader's workers, say) close the write end at once, so that only the
parent holds it.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

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
