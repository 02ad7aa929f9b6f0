"""Waiting for the other ranks, out loud: gloo itself says nothing for half an hour, and then little."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from gossamer.protocol.errors import UnreachableError

TELL_AFTER_S = 20.0
"""The first time; then after twice as long, and so on. Other ranks may well be busy: evaluating, say."""

POLL_S = 1.0

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
        """Inside, the other ranks are waited for. Raises UnreachableError if they are gone."""
        if self._thread.ident is None:
            self._thread.start()
        self._wait = text, time.monotonic()
        try:
            yield
        except RuntimeError as error:  # all that torch.distributed raises
            raise UnreachableError(
                "lost the other ranks of this node: one of them ended, and its last lines say why"
                f" ({str(error).splitlines()[0][:160]})"
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
