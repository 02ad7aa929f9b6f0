"""Finds a node's admin server, and asks it."""

import json
from pathlib import Path
from typing import Any

import aiohttp

from gossamer.node.address import format_address, parse_address
from gossamer.node.daemon.dashboard.server import TOKEN_VARIABLE, token_here
from gossamer.node.formatting import harmless_line
from gossamer.node.home import Home, nodes_root
from gossamer.protocol.errors import ConfigError, UnreachableError

TIMEOUT_S = 5.0


def find_admin(address: str | None, folder: Path | None) -> str:
    """Where to ask: at a given address, or that of the node in a folder, or that of this machine's only node
    or only node that trains. Raises ConfigError."""
    if address is not None:
        return format_address(*parse_address(address))
    where = [folder] if folder else sorted({path.parent for path in nodes_root().glob("*/daemon.json")})
    # Where none runs, what it wrote down is out of date: another may have its port.
    facts = {each: Home(each).read_daemon() or {} for each in where if not Home(each).is_free()}
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


async def fetch_state(address: str) -> dict[str, Any]:
    """The state of the node whose admin server is at an address. Raises UnreachableError."""
    token, url = token_here(), f"http://{address}/api/state"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(url, headers=headers, allow_redirects=False) as response,
        ):
            body = await response.read()
            if response.status == 401:
                raise UnreachableError(f"{url} requires a token: set {TOKEN_VARIABLE} to its node's")
            if response.status != 200:
                text = harmless_line(body[:200].decode("utf-8", "replace"))
                raise UnreachableError(f"{url} answers {response.status}: {text}")
        found = json.loads(body)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise UnreachableError(f"no answer from {url} ({type(error).__name__})") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise UnreachableError(f"the server at {address} is not an admin server")
    return found
