"""Room for uploads: bounded, given back, and not taken for long by who is slow. And rations of them."""

from hashlib import sha256
from pathlib import Path

import pytest

from gossamer.node.daemon.network import upload_limits as uploads
from gossamer.node.daemon.network.upload_limits import UploadLimits
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.protocol import limits
from gossamer.protocol.limits import (
    FETCHES_PER_LINK_MAX,
    RATION_COPIES,
    UPLOAD_SLOT_S,
    UPLOADS_MAX,
    UPLOADS_PER_MEMBER_MAX,
)


def filled(room: UploadLimits) -> list[int]:
    """The numbers of as many uploads as there is room for, to any members."""
    found = [room.begin(bytes([member]), b"blob") for member in range(2 * UPLOADS_MAX)]
    return [number for number in found if number is not None]


def test_no_more_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(uploads.time, "monotonic", lambda: now)
    room = UploadLimits()
    slow = filled(room)
    assert len(slow) == UPLOADS_MAX
    room.end(slow.pop())
    slow += filled(room)
    assert len(slow) == UPLOADS_MAX
    now += 1.5 * UPLOAD_SLOT_S
    young = filled(room)
    assert len(young) == UPLOADS_MAX, "those that take long do not count"
    for number in slow:
        room.end(number)
    assert filled(room) == [], "as they end, the younger ones still go out"
    for number in young:
        room.end(number)
    assert len(filled(room)) == UPLOADS_MAX


def test_one_member_has_no_more_than_half_of_the_room() -> None:
    """It could ask for one small chunk all the time, in 7 kB a second, and take it slowly: of what others
    asked for nine tenths were declined."""
    room = UploadLimits()
    begun = [room.begin(b"n", b"blob") for _ in range(UPLOADS_MAX)]
    taken = [number for number in begun if number is not None]
    assert len(taken) == UPLOADS_PER_MEMBER_MAX >= 2 * FETCHES_PER_LINK_MAX, "honest ones ask for fewer"
    assert room.begin(b"m", b"blob") is not None
    room.end(taken[0])
    assert room.begin(b"n", b"blob") is not None


def test_who_has_taken_its_ration_is_declined_until_there_is_more_to_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(limits, "RATION_BYTES_MIN", 0)
    monkeypatch.setattr(uploads.time, "monotonic", lambda: 100.0)
    chunks = ChunkStore(tmp_path / "chunks")
    blobs = [sha256(data).digest() for data in (b"first", b"other")]
    chunks.put(blobs[0], b"first")
    room = UploadLimits(chunks)

    def given(node_id: bytes, blob: bytes) -> bool:
        begun = room.begin(node_id, blob)
        if begun is not None:
            room.end(begun)
        return begun is not None

    assert [given(b"n", blobs[0]) for _ in range(int(RATION_COPIES) + 2)] == [True] * int(RATION_COPIES) + [
        False
    ] * 2
    assert given(b"m", blobs[0])
    chunks.put(blobs[1], b"other")
    assert given(b"n", blobs[1])
