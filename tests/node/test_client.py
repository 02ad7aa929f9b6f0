"""`gossamer.node.network.client`: what a stranger's node answers is a status, or one clear line."""

from __future__ import annotations

import pytest

from gossamer.node.network.client import parse_status
from gossamer.protocol.errors import UnreachableError


def test_a_status() -> None:
    assert parse_status("host:1", b'{"swarm_id": "a", "node_id": "b"}') == {"swarm_id": "a", "node_id": "b"}


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"\xff", b'{"swarm_id": 1}', b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000]
)
def test_what_is_no_status(body: bytes) -> None:
    with pytest.raises(UnreachableError, match="host:1 sent a status that cannot be read"):
        parse_status("host:1", body)
