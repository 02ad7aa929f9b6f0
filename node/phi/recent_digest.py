"""The digest of what is merged, kept for a while, so that it may be asked for often at little cost."""

import asyncio
import time
from collections.abc import Awaitable, Callable

REST = 9
"""A digest is kept for this many times as long as it took to compute: so merging, which waits meanwhile,
waits for a tenth of the time at most."""


class RecentDigest:
    """Remembers a digest for a while."""

    def __init__(self, find: Callable[[], Awaitable[tuple[bytes, bytes] | None]]) -> None:
        """`find` computes the digests of the records merged and of Phi; None before genesis is here."""
        self._find = find
        self._finding = asyncio.Lock()
        self._found: tuple[bytes, bytes] | None = None
        self._due = 0.0

    async def get(self) -> tuple[bytes, bytes] | None:
        """The digests as they are, or were a moment ago."""
        async with self._finding:
            if time.monotonic() >= self._due:
                begun = time.monotonic()
                self._found = await self._find()
                now = time.monotonic()
                self._due = now + REST * (now - begun)
            return self._found
