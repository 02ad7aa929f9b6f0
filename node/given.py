"""What people give to commands and scripts, checked: addresses, node ids, invitations, manifests."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from gossamer.node.address import WILDCARDS, parse_address, parse_contact, parse_node_id
from gossamer.node.textfile import as_text, read_bytes
from gossamer.node.tilde import expanded
from gossamer.protocol.admission.invitation import INVITATION_BYTES_MAX, PREFIX, Invitation, read_invitation
from gossamer.protocol.errors import ConfigError, MalformedError, UnsupportedError
from gossamer.protocol.limits import ADDRESSES_PER_PEER_MAX, MANIFEST_BYTES_MAX
from gossamer.protocol.manifest import Manifest, from_canonical, from_toml, is_canonical


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
