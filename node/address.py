"""Network addresses as people write them: ``host:port``, ``[v6]:port``."""

import ipaddress

from gossamer.protocol.errors import ConfigError

WILDCARDS = frozenset({"0.0.0.0", "::", ""})


def parse_address(text: str, *, port_min: int = 1) -> tuple[str, int]:
    """Split ``host:port``. Raises ConfigError."""
    host, colon, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdecimal() or not port_min <= int(port) <= 65535 or " " in host:
        raise ConfigError(f"{text!r} is not an address; write HOST:PORT, for example 192.168.1.5:7700")
    return host, int(port)


def format_address(host: str, port: int) -> str:
    """``host:port``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host reaches this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
