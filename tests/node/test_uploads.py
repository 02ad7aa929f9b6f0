"""Room for uploads: bounded, given back, and not taken for long by who is slow."""

import pytest

from gossamer.node.network import uploads
from gossamer.node.network.uploads import Uploads
from gossamer.protocol.limits import UPLOAD_COUNTS_S, UPLOADS_MAX


def test_no_more_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(uploads.time, "monotonic", lambda: now)
    room = Uploads()
    assert [room.begin() for _ in range(UPLOADS_MAX + 1)] == [True] * UPLOADS_MAX + [False]
    room.end()
    assert (room.begin(), room.begin()) == (True, False)
    now += 1.5 * UPLOAD_COUNTS_S
    assert room.begin(), "those that take long do not count"
    for _ in range(3 * UPLOADS_MAX):
        room.end()
    assert [room.begin() for _ in range(UPLOADS_MAX + 1)] == [True] * UPLOADS_MAX + [False]
