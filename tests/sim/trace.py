"""What happened: a running hash that two runs of a seed must share, and, if wanted, lines for people.

The hash covers all messages in the order in which they are sent, and events with their virtual times. It
covers no object whose hash differs between processes (Python salts those of text and bytes). So it also shows
whether the protocol core lets the order of a set of bytes leak into its messages.
"""

from collections.abc import Callable
from zlib import crc32


class Violation(AssertionError):
    """The swarm broke a promise; the message says which, when and where."""


class Trace:
    """Collects the hash, and passes lines on."""

    def __init__(self, show: Callable[[str], None] | None = None) -> None:
        self._show = show
        self._hash = 0

    @property
    def digest(self) -> str:
        """The hash so far, as 16 hex digits."""
        return f"{self._hash & (2**64 - 1):016x}"

    @property
    def is_shown(self) -> bool:
        """Whether lines are shown: building them costs more than the hash."""
        return self._show is not None

    def note(self, time: float, node: int, code: int, data: bytes = b"") -> None:
        """Add one event to the hash."""
        self._hash = hash((self._hash, time, node, code, crc32(data) if data else 0))

    def read(self, data: bytes) -> None:
        """Add a message's bytes to the hash."""
        self._hash = hash((self._hash, crc32(data)))

    def say(self, time: float, text: str) -> None:
        """Show a line, and add it to the hash."""
        self.note(time, -1, len(text), text.encode())
        if self._show is not None:
            self._show(f"{time:9.3f}  {text}")
