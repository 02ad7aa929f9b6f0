"""Finds a node's admin server, and listens to it."""

import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp.http_exceptions import LineTooLong

from gossamer.node.address import format_address, parse_address
from gossamer.node.daemon.dashboard.server import TOKEN_VARIABLE, token_here
from gossamer.node.daemon.network.listening import Resolver
from gossamer.node.formatting import harmless_line
from gossamer.node.home import Home, nodes_root, unreadable
from gossamer.protocol.errors import ConfigError, UnreachableError

EVENT_BYTES_MAX = 32 * 1024 * 1024
CONNECT_TIMEOUT_S = 5.0
SILENCE_S = 20.0
"""A server that has sent nothing for this long, not even a heartbeat, is gone."""


def find_admin(address: str | None, folder: Path | None) -> str:
    """Where to ask: at a given address, or that of the node in a folder, or that of this machine's only node.

    If all of this machine's nodes belong to one swarm, the only one that trains is meant.

    Raises ConfigError.
    """
    if address is not None:
        return format_address(*parse_address(address))
    return _only_admin_here() if folder is None else _admin_in(folder)


def _admin_in(folder: Path) -> str:
    """The admin address of the node in a folder. Raises ConfigError if none runs there, or it has none."""
    is_running = _is_running(folder)
    if is_running and Home(folder).read_daemon() is None:
        raise _says_nothing(folder)
    found = admin_of(folder) if is_running else None
    if found is None:
        raise ConfigError(f"no node with an admin server runs in {folder}; start one, without --admin off")
    return found


def _only_admin_here() -> str:
    """The admin address of this machine's node that must be meant. Raises ConfigError."""
    folders = {path.parent for path in nodes_root().glob("*/daemon*.json")}
    running = [folder for folder in folders if _is_running(folder)]
    starting = [folder for folder in running if Home(folder).read_daemon() is None]
    admins = {folder: admin for folder in running if (admin := admin_of(folder)) and _answers(admin)}
    if not admins and starting:
        raise _says_nothing(min(starting))
    if not admins:
        raise ConfigError(
            f"no node runs in {nodes_root()}; name a node's folder with --dir, or its admin HOST:PORT"
        )
    meant = None if starting else _meant_of(list(admins))
    if meant is None:
        which = ", ".join(f"--dir {folder}" for folder in sorted((*admins, *starting)))
        raise ConfigError(f"which node? Give one of {which}")
    return admins[meant]


def _meant_of(folders: list[Path]) -> Path | None:
    """The only one of some nodes or, if all belong to one swarm, the only one that trains; None if
    unclear."""
    if len(folders) == 1:
        return folders[0]
    training = [folder for folder in folders if (Home(folder).read_daemon() or {}).get("trains")]
    is_one_swarm = len(set(map(_manifest_in, folders))) == 1
    return training[0] if len(training) == 1 and is_one_swarm else None


def _says_nothing(folder: Path) -> ConfigError:
    """The error for a node that seems to run, and has not written down where."""
    path = Home(folder).daemon_path
    try:
        path.read_bytes()
    except FileNotFoundError:
        pass
    except OSError as error:  # another user's node, whose lock cannot be looked at either
        return ConfigError(unreadable(path, error))
    return ConfigError(f"the node in {folder} is still starting; its log will say where it listens")


def _is_running(folder: Path) -> bool:
    """Whether a node runs in a folder. If not, what it wrote down is out of date: another may have its
    port."""
    return Home(folder).lock.is_taken()


def _manifest_in(folder: Path) -> bytes:
    """The stored manifest, which tells swarms apart; empty if it cannot be read."""
    try:
        return Home(folder).manifest_path.read_bytes()
    except OSError:
        return b""


def _answers(address: str) -> bool:
    """Whether anything listens there. A node that has just started may still show its last run's address."""
    try:
        socket.create_connection(parse_address(address), CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


def admin_of(folder: Path) -> str | None:
    """The admin address of the daemon that runs in a folder, or ran there last; None if it is not known."""
    found = (Home(folder).read_daemon() or {}).get("admin")
    try:
        return format_address(*parse_address(found)) if isinstance(found, str) else None
    except ConfigError:
        return None


class AdminClient:
    """Asks one admin server. Use it as an async context manager."""

    def __init__(self, address: str) -> None:
        token = token_here()
        self._url = f"http://{address}"
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "AdminClient":
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(resolver=Resolver()),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=self._headers,
            read_bufsize=EVENT_BYTES_MAX,
            timeout=aiohttp.ClientTimeout(connect=CONNECT_TIMEOUT_S, sock_read=SILENCE_S),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def events(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Name and data of every event, until the server goes. Raises UnreachableError."""
        assert self._session is not None
        try:
            async with self._session.get(f"{self._url}/api/events", allow_redirects=False) as response:
                if response.status == 401:
                    raise UnreachableError(
                        f"{self._url} requires a token: set {TOKEN_VARIABLE} to its node's"
                    )
                if response.status != 200:
                    text = (await response.content.read(200)).decode("utf-8", "replace")
                    raise UnreachableError(f"{self._url} answers {response.status}: {harmless_line(text)}")
                async for event in _events(response.content):
                    yield event
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UnreachableError(f"no answer from {self._url} ({type(error).__name__})") from None
        except (ValueError, RecursionError, LineTooLong):
            raise UnreachableError(f"the server at {self._url} is not an admin server") from None


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Parse https://html.spec.whatwg.org/multipage/server-sent-events.html, as far as we use it."""
    name = ""
    while line := await stream.readline():
        field, _, value = line.rstrip(b"\r\n").partition(b": ")
        if field == b"event":
            name = value.decode()
        elif field == b"data":
            yield name, json.loads(value)
