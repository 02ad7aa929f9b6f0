"""How many chunks we send at a time, over all links.

Who asks while we are busy is declined at once and turns to another holder: a node with many links would
otherwise be where everybody waits, with the same chunks to be had nearby.
"""

import time
from collections import deque

from gossamer.protocol.limits import UPLOAD_COUNTS_S, UPLOADS_MAX


class Uploads:
    """Chunks that we have begun to send, or promised to."""

    def __init__(self) -> None:
        self._begun: deque[float] = deque()

    def begin(self) -> bool:
        """Count one more, if there is room. What takes long counts no more: no taker can stop us."""
        now = time.monotonic()
        while self._begun and self._begun[0] < now - UPLOAD_COUNTS_S:
            self._begun.popleft()
        if len(self._begun) >= UPLOADS_MAX:
            return False
        self._begun.append(now)
        return True

    def end(self) -> None:
        """One has gone out, or nowhere."""
        if self._begun:
            self._begun.popleft()
