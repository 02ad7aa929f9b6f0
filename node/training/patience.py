"""Waiting for the other ranks, out loud: gloo itself says nothing for half an hour, and then little."""

import logging
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from gossamer.protocol.errors import UnreachableError

TELL_AFTER_S = 20.0
"""The first time; then after twice as long, and so on. Other ranks may well be busy: evaluating, say."""

POLL_S = 1.0

GLOO_LOST = re.compile(r"(?!\[enforce fail).*\bgloo[/\\]transport[/\\]")
"""gloo has no class of its own for what befalls a connection: it says where in its transport it was."""

NCCL_OWN = ("ncclUnhandledCudaError", "ncclInvalidArgument", "ncclInvalidUsage")
"""Of NCCL's results those that are this rank's fault, or its device's."""

log = logging.getLogger("gossamer.peer")


class Patience:
    """Tells the person what this rank waits for, if that takes long. It belongs to the training thread."""

    def __init__(self) -> None:
        self._wait: tuple[str, float] | None = None
        """What is waited for, and since when."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="patience", daemon=True)

    @contextmanager
    def during(self, text: str) -> Iterator[None]:
        """Inside, the other ranks are waited for. Raises UnreachableError if they are gone.

        Whatever else goes wrong there, memory that runs out say, comes through as what it is.
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
        """No more is waited for."""
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
    """Whether torch says that other ranks cannot be reached: a connection, a store, time that ran out."""
    if isinstance(error, dist.DistError):
        return not any(result in said for result in NCCL_OWN)
    return GLOO_LOST.match(said) is not None
