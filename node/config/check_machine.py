"""Whether this machine has what a node needs: ports, a device, disk, open files."""

import asyncio
import os
import shutil
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path

from gossamer.node.address import WILDCARDS, check_plaintext, format_address, is_loopback, parse_address
from gossamer.node.config.findings import Finding, error, ok, told, warning
from gossamer.node.dashboard.admin import check_token, token_here
from gossamer.node.network.listening import listen, names_loopback, why_not
from gossamer.node.network.open_files import FILES_MIN, open_files_allowed
from gossamer.node.options import ADMIN_OFF
from gossamer.protocol.errors import ConfigError, LocalError

DISK_SPARE = 1.5
"""Free space should be this many times the estimate."""


def check_listen(
    address: str, *, is_running: bool, is_loopback_swarm: bool, plaintext: bool = False
) -> Iterator[Finding]:
    """The port that others dial."""
    host, port = parse_address(address, port_min=0)
    if plaintext:
        try:
            check_plaintext(host)
        except ConfigError as problem:
            yield error("listen", str(problem))
            return
    yield from _check_bind("listen", host, port, is_running)
    if port == 0 and not is_loopback_swarm:
        yield warning(
            "listen",
            "port 0 lets the system choose; a node that others should find needs a fixed port",
        )
    if (is_loopback(host) or names_loopback(host)) and not is_loopback_swarm:
        yield warning("listen", f"{host} can only be reached from this machine; [::] is every address")


def check_apart(listen_at: str, admin: str) -> Iterator[Finding]:
    """Whether the two ports differ."""
    if admin in ("", ADMIN_OFF):
        return
    (host, port), (other, admin_port) = (parse_address(text, port_min=0) for text in (listen_at, admin))
    if port and port == admin_port and (host == other or {host, other} & set(WILDCARDS)):
        yield error(
            "admin", f"--listen and --admin use the same port, {port}; choose another for one of them"
        )


def check_admin(option: str, *, is_running: bool) -> Iterator[Finding]:
    """The admin server's token and port."""
    is_named = option not in ("", ADMIN_OFF)
    host, port = parse_address(option, port_min=0) if is_named else ("127.0.0.1", 0)
    try:
        check_token(option, host, token_here())
    except ConfigError as problem:
        yield error("admin", str(problem))
    if is_named:
        yield from _check_bind("admin", host, port, is_running)
    else:
        yield ok("admin", "no admin server" if option else "the first free port from 7780 on 127.0.0.1")


def check_advertised(addresses: Iterable[str]) -> Iterator[Finding]:
    """Whether the names that others are told can at least be looked up here."""
    for address in addresses:
        host, port = parse_address(address)
        told_as = format_address(host, port)
        try:
            socket.getaddrinfo(host, port)
        except OSError as problem:
            yield warning("advertise", f"cannot look up {host} from here ({_why(problem)})")
        else:
            yield ok("advertise", f"others are told {told_as}; only they can tell whether it leads here")


def _check_bind(subject: str, host: str, port: int, is_running: bool) -> Iterator[Finding]:
    where = format_address(host, port)
    try:
        asyncio.run(_listen_for_a_moment(host, port))
    except (OSError, OverflowError, UnicodeError) as problem:
        if is_running:
            yield ok(subject, f"{where} is in use, as expected if that is the running node")
        else:
            why = why_not(problem) if isinstance(problem, OSError) else _why(problem)
            yield error(subject, f"cannot listen on {where}: {why}; choose another --{subject}")
    else:
        yield ok(subject, f"can listen on {where}")


async def _listen_for_a_moment(host: str, port: int) -> None:
    """Listen as the node would. Raises OSError."""
    (await listen(asyncio.Protocol, host, port, 1)).close()


def _why(problem: Exception) -> str:
    said = problem.strerror if isinstance(problem, OSError) else None
    return (said or str(problem)).lower()


def check_device(name: str, threads: int) -> Iterator[Finding]:
    """The device that would be trained on. This imports torch."""

    def chosen() -> str:
        try:
            from gossamer.node.trainer import choose_device
        except (ImportError, OSError) as problem:
            raise LocalError(f"cannot use torch: {problem}; install it for this machine") from None
        return f"can train on {choose_device(name)}"

    yield from told("device", chosen)
    cpus = os.cpu_count() or 1
    if threads > cpus:
        yield warning("threads", f"{threads} threads on {cpus} CPUs get in each other's way")


def check_disk(folders: Iterable[Path], needed: int | None) -> Iterator[Finding]:
    """Free space against what a node will need, in bytes; `needed` is None if that is not known yet.

    The folders may be on several disks: the fullest one counts.
    """
    free = min(map(_free_above, folders))
    if needed is None:
        yield ok("disk", f"{_size(free)} free; how much is needed is unknown until the swarm is asked")
    elif free < needed:
        yield error("disk", f"{_size(free)} free, but up to {_size(needed)} needed; see Sizing in the docs")
    elif free < DISK_SPARE * needed:
        yield warning("disk", f"{_size(free)} free, up to {_size(needed)} needed: that is tight")
    else:
        yield ok("disk", f"{_size(free)} free, up to {_size(needed)} needed")


def _free_above(folder: Path) -> int:
    """Bytes free where a folder is, or will be."""
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    return shutil.disk_usage(above).free


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def check_open_files() -> Iterator[Finding]:
    """Whether one process may have enough files and sockets open."""
    limit = open_files_allowed()
    if limit < FILES_MIN:
        yield warning(
            "files",
            f"only {limit} open files allowed; set ulimit -Hn {FILES_MIN}, or LimitNOFILE= in systemd",
        )
    else:
        yield ok("files", "enough open files allowed")
