"""Files that people give to commands and scripts: text, invitations, manifests."""

import os
from pathlib import Path

from gossamer.protocol.access.acl import INVITATION_BYTES_MAX, PREFIX, Invitation, read_invitation
from gossamer.protocol.errors import ConfigError, MalformedError
from gossamer.protocol.limits import MANIFEST_BYTES_MAX
from gossamer.protocol.manifest import Manifest, from_canonical, from_toml, is_canonical


def expanded(path: str | os.PathLike[str]) -> Path:
    """A path with its tilde expanded, which no shell does in a file, or in ``--dir=~/x``: a person who
    removed a folder named ``~`` by that name would remove their home."""
    return Path(os.path.expanduser(path))


def read_bytes(path: Path, bytes_max: int, *, kind: str) -> bytes:
    """A whole file. Raises ConfigError if it cannot be read, or is too large for its `kind`."""
    try:
        with open(path, "rb") as file:
            data = file.read(bytes_max + 1)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', error)}") from None
    if len(data) > bytes_max:
        raise ConfigError(f"{path} is too large for a {kind}")
    return data


def _as_text(data: bytes, path: Path, *, kind: str, hint: str) -> str:
    """A file's text, without a byte order mark. Raises ConfigError, saying what a file of that `kind` is."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text; a {kind} is {hint}") from None


def given_invitation(text: str | None) -> Invitation | None:
    """An invitation given as its text, or as a file that holds it. Raises ConfigError."""
    if text is None:
        return None
    if not text:
        raise ConfigError("the invitation (--invite) is empty: is the shell variable that it names unset?")
    if PREFIX not in text:
        path = expanded(text)
        data = read_bytes(path, INVITATION_BYTES_MAX, kind="invitation")
        text = _as_text(data, path, kind="invitation", hint="what gossamer invite printed")
    return read_invitation(text)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest: a person's TOML file, or the canonical form that a node's folder holds. Raises
    ConfigError."""
    data = read_bytes(path, MANIFEST_BYTES_MAX, kind="manifest")
    if not is_canonical(data):
        text = _as_text(data, path, kind="manifest", hint="TOML, as gossamer init writes it")
        return from_toml(text, str(path))
    try:
        return from_canonical(data)
    except MalformedError as error:
        raise ConfigError(f"{path} is damaged, or no manifest: {error}") from None
