"""No orphans: a child process ends when its parent does, however the parent died.

The parent keeps the write end of a pipe and hands the read end to the child; the kernel closes the write
end with the parent, even on kill -9, and the child reads end-of-file. Works on every Unix. Other processes
that the parent forks (a DataLoader's workers, say) let go of the write end at once: it is the parent's alone.
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
"""Stands for the exit status of a child that is gone, and nobody can tell how any more: a failure, so that it
is started again. A script that ignores SIGCHLD, or reaps whatever ends, takes it."""

_children: "weakref.WeakSet[Child]" = weakref.WeakSet()


def _forked() -> None:
    for child in list(_children):
        child.close()


os.register_at_fork(after_in_child=_forked)


def _open_standard_streams() -> None:
    """Where they are closed (``<&-``), what is opened next would be taken for them, a lifeline for one."""
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
        given.pop("PYTHONINSPECT", None)  # with it a child ends with a traceback, and always with 0
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
        """Exit status, or None while it runs; STATUS_LOST where somebody else in this process has taken it.

        Popen's own would say 0 then, as if it had ended in good order.
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
        """Wait `grace_s` for it to end, then kill it and what it has started; returns its exit status."""
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
        # Its session is its own. A DataLoader's worker whose parent goes before it looks stays for ever.
        with suppress(OSError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()

    def close(self) -> None:
        """Let go of the lifeline, which tells a child that still runs to end."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1


def end_within(seconds: float, status: int) -> None:
    """See that this process ends, with this exit status, also where a thread that is still there will not.

    Python waits for threads that are no daemons: one that waits for more work would keep a trainer that is
    done, or has failed, from being started again.
    """

    def end() -> None:
        time.sleep(seconds)
        os._exit(status)

    threading.Thread(target=end, name="end", daemon=True).start()


def stop_signals() -> list[signal.Signals]:
    """The signals that ask for a stop in good order: Ctrl-C, `kill`, and a terminal that closes.

    Not the last where it is ignored already, as under nohup.
    """
    asked = [signal.SIGINT, signal.SIGTERM]
    return asked if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [*asked, signal.SIGHUP]


def reset_signals() -> None:
    """Undo what the parent has set for its own sake, which a child inherits.

    Where it blocks SIGTERM to wait for it (`signal.sigwait`), the child could not be asked to stop; where it
    ignores SIGCHLD, the child would never hear how its own children end.
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
