"""`gossamer.node.inputs`: invitations and addresses as people give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from gossamer.bootstrap import manifests
from gossamer.bootstrap.invites import invite
from gossamer.node.inputs import given_invitation, read_manifest
from gossamer.protocol.access.acl import Role
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.limits import MANIFEST_BYTES_MAX
from tests.protocol import builders
from tests.protocol.builders import OWNER

HERE = builders.manifest(admission=builders.admission(), name="here")


def test_an_invitation_as_a_mail_has_it() -> None:
    text = invite(OWNER, HERE.swarm_id, bytes(32), role=Role.TRAIN, days=1, contacts=()).to_text()
    for pasted in (f"  {text} \n", f"\n> {text[:60]}\n> {text[60:]}\n"):
        assert given_invitation(pasted) == given_invitation(text)


def test_an_invitation_in_a_file_of_ones_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shell leaves the tilde of ``--invite=~/letter`` alone."""
    monkeypatch.setenv("HOME", str(tmp_path))
    text = invite(OWNER, HERE.swarm_id, bytes(32), role=Role.TRAIN, days=1, contacts=()).to_text()
    (tmp_path / "letter").write_text(text)
    assert given_invitation("~/letter") == given_invitation(text)


def test_an_invitation_from_a_variable_that_is_unset() -> None:
    with pytest.raises(ConfigError, match=r"\(--invite\) is empty: is the shell variable"):
        given_invitation("")


def test_what_is_no_invitation_nor_a_file(tmp_path: Path) -> None:
    for text in ("nowhere", "a\0b", "~nobody-has-this-name/x", str(tmp_path), "x" * 300):
        with pytest.raises(ConfigError, match="cannot read "):
            given_invitation(text)


def test_a_manifest_as_a_person_has_it_and_as_a_nodes_folder_does(tmp_path: Path) -> None:
    manifests.write(HERE, tmp_path / "my.toml")
    (tmp_path / "manifest").write_bytes(HERE.canonical())
    assert read_manifest(tmp_path / "my.toml") == read_manifest(tmp_path / "manifest") == HERE


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (HERE.canonical()[:-1], "is damaged, or no manifest"),
        (HERE.canonical() + b"x", "is damaged, or no manifest"),
        (HERE.canonical().replace(b"\xa7version\x01", b"\xa7version\x7f"), "version: Input should be 1"),
        (b"\xff\xfe", "is not text; a manifest is TOML"),
        (b"", "manifest"),
        (b"\x89" * (MANIFEST_BYTES_MAX + 1), "too large for a manifest"),
    ],
)
def test_what_is_no_manifest(tmp_path: Path, content: bytes, part: str) -> None:
    (tmp_path / "manifest").write_bytes(content)
    with pytest.raises(ConfigError, match=part):
        read_manifest(tmp_path / "manifest")
