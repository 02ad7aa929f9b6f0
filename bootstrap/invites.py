"""What an owner of a swarm does: invite and revoke. The secret key stays with a person, not with a node.

``my.owner`` beside ``my.toml`` holds 32 secret bytes, mode 0600. The manifest holds the public key.
"""

import os
import time
from pathlib import Path

from gossamer.node.files import keep
from gossamer.protocol.access.acl import (
    Grant,
    Invitation,
    Role,
    grant_body,
    parse_grant,
    parse_revocation,
    revocation_body,
)
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.identity import Identity
from gossamer.protocol.limits import ADDRESSES_PER_PEER_MAX, REASON_BYTES_MAX
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.records import RecordKind, seal
from gossamer.protocol.wire import is_printable

SUFFIX = ".owner"
DAY_S = 86400


def check_free(path: Path) -> None:
    """Raise ConfigError if there is already an owner's key where a new one is to be written."""
    if path.exists():
        raise ConfigError(
            f"{path} already exists and may be the key of another swarm's owner: move it, or use it for this"
            " swarm too with --owner-key"
        )


def write_owner(path: Path, secret: bytes) -> None:
    """Write the 32 secret bytes of a new owner's key. Raises ConfigError if there is one, or StorageError."""
    check_free(path)
    keep(path, secret)


def read_owner(path: Path) -> Identity:
    """Read an owner's key. Raises ConfigError."""
    try:
        if path.stat().st_mode & 0o077:
            raise ConfigError(f"{path} can be read by others; run: chmod 600 {path}")
        secret = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the owner's key {path}: {error.strerror}") from None
    try:
        return Identity.from_seed(secret)
    except ConfigError as error:
        raise ConfigError(f"{path} is damaged or not an owner's key ({error}): restore its backup") from None


def find_manifest(path: Path | None) -> Path:
    """The given manifest, or the only one in this folder with an owner's key beside it. Raises
    ConfigError."""
    if path is not None:
        return path
    found = [key.with_suffix(".toml") for key in Path().glob(f"*{SUFFIX}")]
    found = [manifest for manifest in found if manifest.exists()]
    if len(found) != 1:
        raise ConfigError("which swarm? Give its manifest with --manifest")
    return found[0]


def owner_of(manifest: Manifest, manifest_path: Path, key_path: Path | None) -> Identity:
    """The owner whose key is given or lies beside the manifest. Raises ConfigError."""
    beside = manifest_path.with_suffix(SUFFIX)
    if key_path is None and not os.path.lexists(beside):
        raise ConfigError(f"there is no owner's key {beside} beside the manifest: give it with --owner-key")
    owner = read_owner(key_path or beside)
    if owner.public_key.hex() not in manifest.admission.owners:
        raise ConfigError(f"that key does not belong to an owner of swarm {manifest.swarm_id.hex()[:12]}")
    return owner


def invite(
    owner: Identity, swarm_id: bytes, node_id: bytes, *, role: Role, days: float, contacts: tuple[str, ...]
) -> Invitation:
    """Sign a grant for `days` (0 for ever), and pack it with the addresses to join.

    Raises ConfigError for more addresses than an invitation can hold.
    """
    if len(contacts) > ADDRESSES_PER_PEER_MAX:
        raise ConfigError(
            f"an invitation holds at most {ADDRESSES_PER_PEER_MAX} addresses, not {len(contacts)}"
        )
    now = int(time.time())
    body = grant_body(node_id, role, now, now + int(days * DAY_S) if days else 0)
    grant: Grant = parse_grant(seal(owner, RecordKind.GRANT, swarm_id, body))
    return Invitation(swarm_id, grant, contacts)


def revoke(owner: Identity, swarm_id: bytes, node_id: bytes, *, last_round: int, reason: str) -> bytes:
    """Sign a revocation; returns its envelope. Raises ConfigError for one that no node would accept."""
    if not is_printable(reason) or len(reason.encode("utf-8", "replace")) > REASON_BYTES_MAX:
        raise ConfigError(f"--reason must be printable and at most {REASON_BYTES_MAX} bytes long")
    body = revocation_body(node_id, last_round, int(time.time()), reason)
    return parse_revocation(seal(owner, RecordKind.REVOCATION, swarm_id, body)).data
