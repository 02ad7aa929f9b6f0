"""A thread of the trainer's for what it does beside the training loop, such as writing a checkpoint."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

WAIT_POLL_S = 0.001

Submit = Callable[..., "Work"]
"""``(function, *arguments)``: has it called, and tells when that is over."""


class Work:
    """A call that somebody has been asked for."""

    def __init__(self, function: Callable[..., None], *arguments: object) -> None:
        self._function = function
        self._arguments = arguments
        self._error: BaseException | None = None
        self.is_done = False

    def run(self) -> None:
        try:
            # Whoever has a method of its own called holds this, mostly: what is done must not hold it
            # too, or its memory stays until Python next looks for cycles: hardly ever, in a steady loop.
            function, arguments = self._function, self._arguments
            del self._function, self._arguments
            function(*arguments)
        except BaseException as error:  # told to whom it was done for, and the thread goes on
            self._error = error
        finally:
            self.is_done = True

    def wait(self) -> None:
        while not self.is_done:
            time.sleep(WAIT_POLL_S)

    def result(self) -> None:
        """Wait for it, and raise what it came to, if anything."""
        self.wait()
        error, self._error = self._error, None  # once: its traceback holds this
        if error is not None:
            try:
                raise error
            finally:
                del error


class WorkThread:
    """Does one piece of work after another.

    Without a lock that the training thread would take: a script's handler of a signal may have the peer
    leave, and so wait for this thread, while that is anywhere in here. An executor has several, and takes no
    work once the main thread has ended.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._waiting: SimpleQueue[Work | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_to_end = False

    def submit(self, function: Callable[..., None], *arguments: object) -> Work:
        """Have a call done; here and now, where there can be no thread."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no more of them just now, or the interpreter ends
                return at_once(function, *arguments)
            self._thread = thread
        work = Work(function, *arguments)
        self._waiting.put(work)
        if self._is_to_end:  # told so while this was being said
            self._do_what_waits()
        return work

    def end(self) -> None:
        """Once what it has been given is done."""
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
    """Do a call here and now; what it raises, `Work.result` does."""
    work = Work(function, *arguments)
    work.run()
    return work
