"""Logs what a rank waits for: gloo itself says nothing for half an hour, and then little."""

import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from gossamer.protocol.errors import UnreachableError

TELL_AFTER_S = 20.0
"""When to log for the first time; each next time comes after twice as long. Other ranks may just be busy,
with an evaluation say."""

POLL_S = 1.0

GLOO_LOST = re.compile(r"(?!\[enforce fail).*\bgloo[/\\]transport[/\\]")
"""gloo has no error class for a lost connection: its message names the place in its transport code."""

NCCL_OWN = ("ncclUnhandledCudaError", "ncclInvalidArgument", "ncclInvalidUsage")
"""NCCL results that are the fault of this rank, or of its device."""

log = logging.getLogger("gossamer.peer")


class Patience:
    """Tells the person what this rank waits for, if that takes long. Belongs to the training thread."""

    def __init__(self) -> None:
        self._wait: tuple[str, float] | None = None
        """What this rank waits for, and since when."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="patience", daemon=True)

    @contextmanager
    def during(self, text: str) -> Iterator[None]:
        """Inside, this rank waits for the others. Raises UnreachableError if they are gone.

        Any other error, such as memory that runs out, passes through unchanged.
        """
        if self._thread.ident is None:
            self._thread.start()
        self._wait = text, time.monotonic()
        try:
            yield
        except RuntimeError as error:
            said = str(error)
            if not _tells_of_loss(error, said):
                raise
            raise UnreachableError(
                "lost the other ranks of this node: one of them ended, and its last lines say why"
                f" ({said.partition(chr(10))[0][:160]})"
            ) from error
        finally:
            self._wait = None

    def close(self) -> None:
        """End the thread: there is nothing more to wait for."""
        self._over.set()

    def _watch(self) -> None:
        told: tuple[str, float] | None = None
        tell_after = TELL_AFTER_S
        while not self._over.wait(POLL_S):
            wait = self._wait
            if wait is None:
                continue
            if wait != told:
                told, tell_after = wait, TELL_AFTER_S
            text, since = wait
            waited = time.monotonic() - since
            if waited >= tell_after:
                tell_after = 2 * waited
                log.warning("%s (waited %.0f s)", text, waited)


def _tells_of_loss(error: RuntimeError, said: str) -> bool:
    """Whether torch's error means that other ranks cannot be reached: a connection, a store, a timeout."""
    if isinstance(error, dist.DistError):
        return not any(result in said for result in NCCL_OWN)
    return GLOO_LOST.match(said) is not None
