"""How many chunks we send at a time, over all links, and how many each member gets.

Who asks while we are busy is declined at once and turns to another holder: a node with many links would
otherwise be where everybody waits, with the same chunks to be had nearby. Who has taken its ration is
declined likewise.
"""

import time
from collections import deque

from gossamer.node.storage.chunkstore import ChunkStore
from gossamer.protocol.limits import UPLOAD_COUNTS_S, UPLOADS_MAX
from gossamer.protocol.rations import Rations


class Uploads:
    """Chunks that we have begun to send, or promised to."""

    def __init__(self, chunks: ChunkStore | None = None) -> None:
        """`chunks` are what members' rations are measured by; without, there are none."""
        self._chunks = chunks
        self._rations = Rations()
        self._begun: deque[float] = deque()

    def begin(self, node_id: bytes, blob: bytes) -> bool:
        """Count one more, if there is room, and the member's ration allows for it.

        What takes long counts no more: no taker can stop us.
        """
        now = time.monotonic()
        while self._begun and self._begun[0] < now - UPLOAD_COUNTS_S:
            self._begun.popleft()
        if len(self._begun) >= UPLOADS_MAX:
            return False
        if self._chunks is not None and not self._rations.take(
            node_id, self._chunks.size(blob), self._chunks.stock, now
        ):
            return False
        self._begun.append(now)
        return True

    def end(self) -> None:
        """One has gone out, or nowhere."""
        if self._begun:
            self._begun.popleft()
