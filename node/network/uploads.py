"""How many chunks we send at a time, over all links, and how many each member gets.

A peer that asks while we are busy is declined at once and turns to another holder: otherwise everybody would
wait at the nodes with many links, while the same chunks were available nearby. A peer that has used up its
ration is declined too.
"""

import time
from itertools import count

from gossamer.node.network.uplink import Uplink
from gossamer.node.storage.chunkstore import ChunkStore
from gossamer.protocol.admission.rations import Rations
from gossamer.protocol.limits import UPLOAD_SLOT_S, UPLOADS_MAX, UPLOADS_PER_MEMBER_MAX


class Uploads:
    """Chunks that we have begun to send, or promised to."""

    def __init__(self, chunks: ChunkStore | None = None) -> None:
        """Members' rations are measured against `chunks`; without `chunks` there are no rations."""
        self.uplink = Uplink()
        """The line that all uploads share."""
        self._chunks = chunks
        self._rations = Rations()
        self._numbers = count()
        self._begun: dict[int, tuple[float, bytes]] = {}
        """For the uploads that count, oldest first: when each began, and for which node id."""

    def begin(self, node_id: bytes, blob: bytes) -> int | None:
        """Begin an upload if there is room and the member's ration allows it. Returns its number, or None.

        An upload that takes long no longer counts, and no member gets all the room: so no peer can block us.
        """
        now = time.monotonic()
        while self._begun:
            oldest, (begun, _) = next(iter(self._begun.items()))
            if begun >= now - UPLOAD_SLOT_S:
                break
            del self._begun[oldest]
        theirs = sum(of_one == node_id for _, of_one in self._begun.values())
        if len(self._begun) >= UPLOADS_MAX or theirs >= UPLOADS_PER_MEMBER_MAX:
            return None
        if self._chunks is not None and not self._rations.take(
            node_id, self._chunks.length(blob), self._chunks.stock, now
        ):
            return None
        number = next(self._numbers)
        self._begun[number] = now, node_id
        return number

    def end(self, number: int) -> None:
        """A chunk has been sent, or never will be."""
        self._begun.pop(number, None)
