"""Network addresses as people write them: ``host:port``, ``[v6]:port``, ``gossamer://NODE_ID@host:port``."""

import ipaddress
import re
from dataclasses import dataclass

from gossamer.protocol.errors import ConfigError
from gossamer.protocol.limits import TEXT_BYTES_MAX
from gossamer.protocol.wire import is_printable

_NAME = re.compile(r"(?!.{254})[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")
_PORT = re.compile(r"[0-9]{1,5}")

SCHEME = "gossamer://"
_NODE_ID = re.compile(r"[0-9a-f]{64}")
_SWARM_ID = re.compile(r"[0-9a-f]{1,64}")

WILDCARDS = frozenset({"0.0.0.0", "::", ""})


def parse_address(text: str, *, port_min: int = 1) -> tuple[str, int]:
    """Split ``host:port``; an IP address comes in its usual spelling. Raises ConfigError."""
    host, _, port = text.strip().rpartition(":")
    is_v6 = host.startswith("[") and host.endswith("]") and _is_v6(host[1:-1])
    fits = is_v6 or _NAME.fullmatch(host)
    if not fits or not _PORT.fullmatch(port) or not port_min <= int(port) <= 65535:
        raise ConfigError(f"{text!r} is not an address; write HOST:PORT, for example 192.168.1.5:7700")
    return str(ipaddress.IPv6Address(host[1:-1])) if is_v6 else host, int(port)


def port_of(address: object) -> int:
    """The port of this node's earlier address, as a file has it; 0 if that is not an address."""
    try:
        return parse_address(address)[1] if isinstance(address, str) else 0
    except ConfigError:
        return 0


def _is_v6(host: str) -> bool:
    try:
        return ipaddress.IPv6Address(host).scope_id is None  # a scope means something on one machine only
    except ValueError:
        return False


def format_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def unmapped(host: str) -> str:
    """An IPv4 address in its plain form; a dual-stack socket shows it as an IPv6 one, ``::ffff:1.2.3.4``."""
    return host.removeprefix("::ffff:") if "." in host else host


def origin_of(host: str) -> str | None:
    """The name under which an address has a budget: itself, or its /64 for IPv6; None for loopback.

    A host with one IPv6 address has a whole /64. Only our own machine's processes use loopback.
    """
    address = _parsed(host)
    if address is None or address.is_loopback:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def network_group(host: str) -> str | None:
    """The part of the internet that an address is in, /24 or /48; None in a LAN and on loopback."""
    address = _parsed(host)
    if address is None or not address.is_global:
        return None
    return str(ipaddress.ip_network((address, 24 if address.version == 4 else 48), strict=False))


def is_loopback(host: str) -> bool:
    """Whether a host reaches this machine only."""
    address = _parsed(host)
    return host == "localhost" if address is None else address.is_loopback


def is_of_one_interface(host: str) -> bool:
    """Whether an IPv6 address is link-local. Its meaning depends on the interface, so it is never
    announced."""
    address = _parsed(host)
    return isinstance(address, ipaddress.IPv6Address) and address.is_link_local


@dataclass(frozen=True, slots=True)
class Contact:
    """Where a node can be dialled and, if known, which node must answer there."""

    address: str
    node_id: bytes | None = None

    def __str__(self) -> str:
        return f"{SCHEME}{self.node_id.hex()}@{self.address}" if self.node_id else self.address


def parse_node_id(text: str) -> bytes:
    """A node id as `gossamer id` prints it. Raises ConfigError."""
    digits = text.strip().lower()
    if not _NODE_ID.fullmatch(digits):
        raise ConfigError(f"{text!r} is not a node id: those have 64 hex digits, as gossamer id prints them")
    return bytes.fromhex(digits)


def check_swarm_id(text: str) -> None:
    """Raise ConfigError unless this can begin a swarm id. An unset shell variable would match every swarm."""
    if not _SWARM_ID.fullmatch(text.lower()):
        raise ConfigError(f"{text!r} is not a swarm id, nor the beginning of one: up to 64 hex digits")


def is_swarm(swarm_id: bytes, wanted: str) -> bool:
    """Whether a swarm is the wanted one: `wanted` is its id, or the beginning of it."""
    return swarm_id.hex().startswith(wanted.lower())


def check_is_swarm(swarm_id: bytes, wanted: str | None, subject: str) -> None:
    """Raise ConfigError, ``SUBJECT swarm ID, not WANTED``, if a swarm other than this one is wanted."""
    if wanted is not None and not is_swarm(swarm_id, wanted):
        raise ConfigError(f"{subject} swarm {swarm_id.hex()[:12]}, not {wanted}")


def check_node_name(text: str) -> None:
    """Raise ConfigError for a name that others would not take, or that a terminal might obey."""
    if not is_printable(text) or len(text.encode(errors="replace")) > TEXT_BYTES_MAX:
        raise ConfigError(f"a name is printable text of at most {TEXT_BYTES_MAX} bytes")


def check_plaintext(host: str) -> None:
    """Raise ConfigError if a node without TLS would listen where other machines can reach it."""
    if not is_loopback(host):
        raise ConfigError(f"plaintext is for loopback only; listen on 127.0.0.1, not {host}, or use TLS")


def parse_contact(text: str) -> Contact:
    """Read ``host:port`` or ``gossamer://NODE_ID@host:port``. Raises ConfigError."""
    rest = text.strip().removeprefix(SCHEME)
    node_id, at, address = rest.rpartition("@")
    parse_address(address)
    return Contact(address.strip(), parse_node_id(node_id) if at else None)
