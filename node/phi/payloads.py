"""Deltas' payloads as merges want them: measured once, then read tensor by tensor.

A round has as many payloads as the swarm has members. As many of them as the limits allow are in memory while
it is merged. The others stay on disk, and are read one tensor at a time.
"""

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from gossamer.node.storage.chunkstore import ChunkStore
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.merging.merge import Contribution, Sample, measure
from gossamer.protocol.payloads.chunks import payload_chunk_bytes
from gossamer.protocol.payloads.layout import Fragment
from gossamer.protocol.payloads.payload import Payload, Section, section_of, section_starts
from gossamer.protocol.records import Delta

KEPT_BYTES = 64 * 1024 * 1024
"""Size of the payloads kept in memory from one merge to the next."""

MERGED_BYTES_PER_VALUE = 4
"""Size of the payloads in memory while a fragment is merged: as much as its Phi takes. If some were on disk,
the merge would need a copy of its Phi (see `Merger`), so keeping fewer in memory would save nothing."""

SAMPLES_KEPT = 256
"""Samples kept, those of the deltas read last, at most 256 KiB each: enough for a round with that many
members. A delta whose sample is gone, such as one of an old round that is merged again, is not compared with
others."""

MEASURED_KEPT = 4096
"""Deltas whose norms are kept, 8 bytes per tensor. Others are measured again if their round is merged again:
with 256 members, the 1,040 rounds that are not closed have 266,000 deltas."""


class Payloads:
    """Reads the payloads of deltas that are here. It blocks, and serves one merge at a time."""

    def __init__(self, manifest: Manifest, chunks: ChunkStore) -> None:
        self._fragments = len(manifest.plan().fragments)
        self._chunks = chunks
        self._norms: OrderedDict[bytes, array[float] | None] = OrderedDict()
        """The norm of each tensor of every payload that was decoded once; None for an undecodable payload."""
        self._samples: OrderedDict[bytes, Sample] = OrderedDict()
        self._in_memory: OrderedDict[bytes, Payload] = OrderedDict()
        self._bytes = 0
        """Size of these payloads. A small model has so many that adding it up would take longer than to
        merge."""
        self._wanted: set[bytes] = set()
        """Deltas being worked on whose payloads are to be in memory."""

    @contextmanager
    def room_for(self, deltas: Collection[Delta], fragment: Fragment) -> Iterator[None]:
        """While these deltas are worked on, keep as many of their payloads in memory as the limits allow."""
        room = max(KEPT_BYTES, MERGED_BYTES_PER_VALUE * fragment.numel)
        for delta in deltas:
            if delta.body.payload_bytes <= room:
                room -= delta.body.payload_bytes
                self._wanted.add(delta.record_id)
        self._trim(room)
        try:
            yield
        finally:
            self._wanted.clear()
            self._trim(KEPT_BYTES)

    def are_in_memory(self, deltas: Collection[Delta]) -> bool:
        """Whether all of these deltas, whose contributions were asked for, can be merged without reading
        files."""
        return all(delta.record_id in self._in_memory or self._is_void(delta) for delta in deltas)

    def undecodable(self, deltas: Iterable[Delta]) -> list[bytes]:
        """Authors of the deltas whose payloads do not decode."""
        return [delta.author for delta in deltas if self._is_void(delta)]

    def contribution(self, delta: Delta, fragment: Fragment) -> Contribution | None:
        """A record as Merge sees it. None if its payload does not decode: it then weighs nothing on any node.

        Raises MissingChunkError, as does reading one of its tensors that is not in memory.
        """
        norms = self._measure(delta, fragment)
        if norms is None:
            return None
        payload = self._in_memory.get(delta.record_id)
        return Contribution(
            author=delta.author,
            tokens=delta.body.tokens,
            steps=delta.body.steps,
            staleness=delta.staleness(self._fragments),
            norms=norms,
            tensor=(payload or _Stored(self._chunks, delta, fragment)).section,
            sample=self._samples.get(delta.record_id),
        )

    def forget(self, delta: Delta) -> None:
        """A delta's round is closed: its payload will not be asked for again."""
        self._norms.pop(delta.record_id, None)
        self._samples.pop(delta.record_id, None)
        self._let_go(delta.record_id)

    def _measure(self, delta: Delta, fragment: Fragment) -> "array[float] | None":
        """A payload's norms. It is read if they are not known yet, or if it is to be in memory."""
        record_id = delta.record_id
        is_lacking = record_id in self._wanted and record_id not in self._in_memory
        if record_id not in self._norms or (is_lacking and not self._is_void(delta)):
            self._read(delta, fragment)
        self._norms.move_to_end(record_id)
        return self._norms[record_id]

    def _is_void(self, delta: Delta) -> bool:
        return self._norms.get(delta.record_id, ()) is None

    def _read(self, delta: Delta, fragment: Fragment) -> None:
        """Read a whole payload. Raises MissingChunkError."""
        data = self._chunks.join(delta.body.chunks)
        try:
            payload = Payload(delta.body.codec, fragment, data)
            if delta.record_id not in self._norms:
                self._note(delta, payload)
            if delta.record_id in self._wanted:
                self._let_go(delta.record_id)
                self._in_memory[delta.record_id] = payload
                self._bytes += payload.size
        except PayloadError:
            self._norms[delta.record_id] = None
        while len(self._norms) > MEASURED_KEPT:
            self._norms.popitem(last=False)

    def _note(self, delta: Delta, payload: Payload) -> None:
        """Decode a payload for the first time. Raises PayloadError."""
        norms, sample = measure(payload)
        self._norms[delta.record_id] = array("d", norms)
        self._samples[delta.record_id] = sample
        while len(self._samples) > SAMPLES_KEPT:
            self._samples.popitem(last=False)

    def _trim(self, room: int) -> None:
        """Keep only the latest of the payloads that are not wanted now: those that fit into `room` bytes."""
        wanted = (self._in_memory[record_id] for record_id in self._wanted if record_id in self._in_memory)
        taken = self._bytes - sum(payload.size for payload in wanted)
        oldest: list[bytes] = []
        for record_id, payload in self._in_memory.items():
            if taken <= room:
                break
            if record_id not in self._wanted:
                oldest.append(record_id)
                taken -= payload.size
        for record_id in oldest:
            self._let_go(record_id)

    def _let_go(self, record_id: bytes) -> None:
        """Drop a payload from memory."""
        if (payload := self._in_memory.pop(record_id, None)) is not None:
            self._bytes -= payload.size


class _Stored:
    """A payload on disk. The chunk read last is kept, since the next tensor usually begins in it."""

    def __init__(self, chunks: ChunkStore, delta: Delta, fragment: Fragment) -> None:
        self._chunks = chunks
        self._delta = delta
        self._fragment = fragment
        self._starts = section_starts(CODECS[delta.body.codec], fragment)
        self._chunk_bytes = payload_chunk_bytes(delta.body.payload_bytes)
        self._last: tuple[int, bytes] | None = None

    def section(self, index: int) -> Section:
        """One tensor's bytes, read and checked. Raises MissingChunkError."""
        start, stop = self._starts[index], self._starts[index + 1]
        data = bytearray()
        for place in range(start // self._chunk_bytes, -(-stop // self._chunk_bytes)):
            first = place * self._chunk_bytes
            data += memoryview(self._chunk(place))[max(0, start - first) : stop - first]
        return section_of(self._delta.body.codec, self._fragment.slots[index], memoryview(data))

    def _chunk(self, place: int) -> bytes:
        last = self._last
        if last is None or last[0] != place:
            self._last = last = (place, self._chunks.get(self._delta.body.chunks[place]))
        return last[1]
