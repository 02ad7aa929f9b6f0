"""A thread for what the trainer does beside its loop, such as writing a checkpoint."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

WAIT_POLL_S = 0.001

Submit = Callable[..., "Work"]
"""``(function, *arguments)``: has the function called, and returns the `Work` that tells when it is done."""


class Work:
    """A call that has been submitted."""

    def __init__(self, function: Callable[..., None], *arguments: object) -> None:
        self._function = function
        self._arguments = arguments
        self._error: BaseException | None = None
        self.is_done = False

    def run(self) -> None:
        try:
            # An object that submits one of its own methods usually keeps this `Work`. Finished work must not
            # refer back to the object: the cycle would be freed only by the garbage collector, which hardly
            # ever runs in a steady loop.
            function, arguments = self._function, self._arguments
            del self._function, self._arguments
            function(*arguments)
        except BaseException as error:  # `result` raises it; the thread goes on
            self._error = error
        finally:
            self.is_done = True

    def wait(self) -> None:
        while not self.is_done:
            time.sleep(WAIT_POLL_S)

    def result(self) -> None:
        """Wait for the call, and raise its error, if any."""
        self.wait()
        error, self._error = self._error, None  # raised once only, as its traceback refers to this
        if error is not None:
            try:
                raise error
            finally:
                del error


class WorkThread:
    """Does one piece of work after another.

    It has no lock that the training thread takes: a script's signal handler may make the peer leave, and so
    wait for this thread, while the training thread is anywhere in here. An executor has several locks, and
    takes no work once the main thread has ended.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: SimpleQueue[Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_to_end = False

    def submit(self, function: Callable[..., None], *arguments: object) -> Work:
        """Have a call done by the thread, or at once if there can be no thread."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more threads just now, or the interpreter is exiting
                return at_once(function, *arguments)
            self._thread = thread
        work = Work(function, *arguments)
        self._waiting.put(work)
        if self._is_to_end:  # `end` was called meanwhile, and the thread may be gone
            self._do_what_waits()
        return work

    def end(self) -> None:
        """End the thread once all submitted work is done."""
        self._is_to_end = True
        self._waiting.put(None)

    def _do_what_waits(self) -> None:
        with suppress(Empty):
            while True:
                if (work := self._waiting.get_nowait()) is not None:
                    work.run()

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            work.run()


def at_once(function: Callable[..., None], *arguments: object) -> Work:
    """Make a call at once; `Work.result` raises its error, if any."""
    work = Work(function, *arguments)
    work.run()
    return work
