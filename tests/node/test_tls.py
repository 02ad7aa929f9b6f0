"""The certificate of a node."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from gossamer.node.daemon.network.tls import Certificate, cut
from gossamer.protocol.errors import (
    StorageError,
)
from tests.protocol import builders
from tests.protocol.builders import identity

INVITED = builders.manifest(admission=builders.admission())
ALICE, BOB = identity(1), identity(2)


def test_a_certificate_is_kept_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "tls.pem"
    first = Certificate.of(path)
    assert path.stat().st_mode & 0o777 == 0o600 and len(first.fingerprint) == 32
    path.chmod(0o644)
    assert Certificate.of(path).fingerprint == first.fingerprint
    assert path.stat().st_mode & 0o777 == 0o600
    assert Certificate.fresh().fingerprint != Certificate.fresh().fingerprint


@pytest.mark.parametrize("content", [b"", b"junk", b"half", b"-----BEGIN CERTIFICATE-----\n"])
def test_a_damaged_certificate_is_made_anew(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tls.pem"
    first = Certificate.of(path)
    path.write_bytes(content if content != b"half" else path.read_bytes()[:150])
    second = Certificate.of(path)
    assert second.fingerprint not in (first.fingerprint, b"")
    assert Certificate.of(path).fingerprint == second.fingerprint
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_certificate_that_cannot_be_kept(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="missing"):
        Certificate.of(tmp_path / "missing" / "tls.pem")


def test_a_connection_that_was_closed_twice_is_left_to_end() -> None:
    """As Python 3.11.2 has it, where other releases let it be cut."""
    transport = Mock(abort=Mock(side_effect=AttributeError("'NoneType' object has no attribute '_abort'")))
    cut(transport)
    assert transport.abort.called
