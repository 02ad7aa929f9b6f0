"""Finds a node's admin server, and listens to it."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp.http_exceptions import LineTooLong

from gossamer.node.address import format_address, parse_address
from gossamer.node.daemon.dashboard.server import TOKEN_VARIABLE, token_here
from gossamer.node.daemon.network.listening import Resolver
from gossamer.node.formatting import harmless_line
from gossamer.node.home import Home, nodes_root
from gossamer.protocol.errors import ConfigError, UnreachableError

EVENT_BYTES_MAX = 32 * 1024 * 1024
CONNECT_TIMEOUT_S = 5.0
SILENCE_S = 20.0
"""A server that has sent nothing for this long, not even a heartbeat, is gone."""


def find_admin(address: str | None, folder: Path | None) -> str:
    """Where to ask: at a given address, or that of the node in a folder, or that of this machine's only node
    or only node that trains. Raises ConfigError."""
    if address is not None:
        return format_address(*parse_address(address))
    where = [folder] if folder else sorted({path.parent for path in nodes_root().glob("*/daemon.json")})
    # Where none runs, what it wrote down is out of date: another may have its port.
    facts = {each: Home(each).read_daemon() or {} for each in where if Home(each).lock.is_taken()}
    running = {each: found for each, found in facts.items() if found.get("admin")}
    if not running:
        raise ConfigError(
            f"no node with an admin server runs in {folder or nodes_root()}; start one without --admin off,"
            " or name its folder with --dir, or its admin HOST:PORT"
        )
    training = [each for each, found in running.items() if found.get("trains")]
    meant = list(running) if len(running) == 1 else training
    if len(meant) != 1:
        raise ConfigError(f"which node? Give one of {', '.join(f'--dir {each}' for each in running)}")
    return format_address(*parse_address(str(running[meant[0]]["admin"])))


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
