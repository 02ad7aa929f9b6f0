"""What people give to commands and scripts, checked: addresses, node ids, invitations, manifests."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from gossamer.node.address import WILDCARDS, parse_address, parse_contact, parse_node_id
from gossamer.protocol.access.acl import INVITATION_BYTES_MAX, PREFIX, Invitation, read_invitation
from gossamer.protocol.errors import ConfigError, MalformedError, UnsupportedError
from gossamer.protocol.limits import ADDRESSES_PER_PEER_MAX, MANIFEST_BYTES_MAX
from gossamer.protocol.manifest import Manifest, from_canonical, from_toml, is_canonical

# --- ``~`` in paths that no shell has expanded: in a file, in an environment set by a file, in ``--dir=~/x``.


def expanded(path: Path) -> Path:
    """A path with its tilde expanded; unchanged if the home folder is not known.

    Otherwise a folder named ``~`` would be created, and a person who removed it by that name would remove
    their home.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        return path


# --- Text files that a person has written or edited.


def read_bytes(path: Path, bytes_max: int, *, kind: str) -> bytes:
    """A whole file. Raises ConfigError if it cannot be read, or is too large for its `kind`."""
    try:
        with open(path, "rb") as file:
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > bytes_max:
        raise ConfigError(f"{path} is too large for a {kind}")
    return data


def read_text(path: Path, bytes_max: int, *, kind: str, hint: str) -> str:
    """A whole file as text: `read_bytes`, then `as_text`. Raises ConfigError."""
    return as_text(read_bytes(path, bytes_max, kind=kind), path, kind=kind, hint=hint)


def as_text(data: bytes, path: Path, *, kind: str, hint: str) -> str:
    """A file's content without a byte order mark.

    Raises ConfigError if it is not UTF-8; the message says by `hint` what a file of that `kind` is.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text; a {kind} is {hint}") from None


# --- Messages reworded for scripts, where a flag is an argument of `Peer.attach`.

_ONE = {
    "dir": "folder",
    "invite": "invite",
    "swarm-id": "swarm_id",
    "listen": "listen",
    "name": "name",
}
_SEVERAL = {"join": "join", "trust": "trust", "advertise": "advertise"}
_SWITCHES = {"insecure-plaintext": "plaintext=True", "debug": "debug=True"}

# A command to be typed (`gossamer id --dir D`) is left as it is. A flag's value is taken along if it is a
# PLACEHOLDER or a path.
_FLAG = re.compile(
    r"(?P<command>gossamer [a-z]+(?: [A-Z_]+| --[a-z-]+(?: (?!--)[^\s;,]+)?)+)"
    r"|--(?P<flag>[a-z-]+)(?: (?P<value>[A-Z_:]{2,}|[/~]\S+))?"
)


def for_a_script(text: str) -> str:
    """A command's message in a script's terms: ``--join ADDRESS`` becomes ``join=[ADDRESS]``."""
    return _FLAG.sub(_as_argument, text)


def _as_argument(found: re.Match[str]) -> str:
    flag, value = found["flag"], found["value"] or ""
    if found["command"]:
        return found[0]
    if flag in _SWITCHES:
        return _SWITCHES[flag] + (f" {value}" if value else "")
    if flag in _ONE:
        return f"{_ONE[flag]}={value}"
    if flag in _SEVERAL:
        return f"{_SEVERAL[flag]}={f'[{value}]' if value else ''}"
    return found[0]


def checked_join(join: Iterable[str] | None) -> tuple[str, ...]:
    """Addresses to join. Raises ConfigError for one that is not valid."""
    return tuple(str(parse_contact(text)) for text in join or ())


def checked_trust(trust: Iterable[str] | None) -> tuple[str, ...]:
    """Node ids in hex, as options hold them. Raises ConfigError for one that is not valid."""
    return tuple(parse_node_id(text).hex() for text in trust or ())


def checked_advertise(advertise: Sequence[str] | None) -> tuple[str, ...]:
    """Addresses to be dialled at. Raises ConfigError for an invalid one, or for more than other nodes
    accept."""
    addresses = tuple(text.strip() for text in advertise or ())
    for address in addresses:
        host, _ = parse_address(address)
        if host in WILDCARDS:
            raise ConfigError(
                f"nobody can dial {address}: advertise an address at which others reach this node"
            )
    if len(addresses) > ADDRESSES_PER_PEER_MAX:
        raise ConfigError(
            f"a node can advertise {ADDRESSES_PER_PEER_MAX} addresses at most, not {len(addresses)}"
        )
    return addresses


def given_invitation(text: str | None) -> Invitation | None:
    """An invitation given as its text, or as a file that holds it. Raises ConfigError."""
    if text is None:
        return None
    if not text:
        raise ConfigError("--invite is empty: is the shell variable that it names unset?")
    if PREFIX not in text:
        try:
            with open(expanded(Path(text)), encoding="utf-8-sig") as file:
                text = file.read(INVITATION_BYTES_MAX)
        except UnicodeDecodeError:
            raise ConfigError(f"{text} is not text; give what gossamer invite printed") from None
        except (OSError, ValueError) as error:  # ValueError: a null character in the path
            raise ConfigError(
                f"--invite takes an invitation or a file with one; {text!r:.60}: "
                + (error.strerror if isinstance(error, OSError) and error.strerror else str(error))
            ) from None
    return read_invitation(text)


def read_manifest(path: Path) -> Manifest:
    """Read a manifest: a person's TOML file, or the canonical form that a node's folder holds. Raises
    ConfigError."""
    data = read_bytes(path, MANIFEST_BYTES_MAX, kind="manifest")
    if not is_canonical(data):
        text = as_text(data, path, kind="manifest", hint="TOML, as gossamer init writes it")
        return from_toml(text, str(path))
    try:
        return from_canonical(data)
    except UnsupportedError as error:
        raise ConfigError(f"this release cannot use {path}: {error}") from None
    except MalformedError as error:
        raise ConfigError(f"{path} is damaged, or no manifest: {error}") from None
