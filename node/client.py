"""Asking a running node from outside: its manifest and its status."""

import asyncio
import json
import os
from typing import Any

import aiohttp

from gossamer.node.address import parse_address
from gossamer.node.tls import client_context
from gossamer.node.transport import PREFIX
from gossamer.protocol.errors import ConfigError, MalformedError, UnreachableError
from gossamer.protocol.limits import MANIFEST_BYTES_MAX
from gossamer.protocol.manifest import Manifest, from_canonical

ASK_TIMEOUT_S = 10.0
STATUS_BYTES_MAX = 16 * 1024 * 1024


async def _ask(address: str, path: str, bytes_max: int, *, plaintext: bool) -> bytes:
    parse_address(address)
    scheme = "http" if plaintext else "https"
    try:
        async with (
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=ASK_TIMEOUT_S), auto_decompress=False
            ) as session,
            session.get(
                f"{scheme}://{address}{PREFIX}/{path}", ssl=False if plaintext else client_context()
            ) as response,
        ):
            if response.status != 200:
                raise UnreachableError(f"{address} is not a Gossamer node (HTTP status {response.status})")
            body = await response.content.read(bytes_max + 1)
            while len(body) <= bytes_max and (more := await response.content.read(bytes_max + 1 - len(body))):
                body += more
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise UnreachableError(
            f"nobody useful answers at {address} ({_reason(error)}); is the node running?"
        ) from None
    if len(body) > bytes_max:
        raise UnreachableError(f"{address} sends more than a node would")
    return body


def _reason(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error) or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)


def fetch_manifest(addresses: tuple[str, ...], swarm_id: str | None, *, plaintext: bool) -> Manifest:
    """Get the manifest from the first address that answers, checking the swarm id if one is given.

    Raises UnreachableError or ConfigError.
    """
    problems: list[UnreachableError] = []
    for address in addresses:
        try:
            data = asyncio.run(_ask(address, "manifest", MANIFEST_BYTES_MAX, plaintext=plaintext))
            manifest = from_canonical(data)
        except UnreachableError as error:
            problems.append(error)
            continue
        except MalformedError as error:
            raise ConfigError(f"{address} sent a manifest that cannot be used: {error}") from None
        if swarm_id is not None and not manifest.swarm_id.hex().startswith(swarm_id.lower()):
            raise ConfigError(f"{address} belongs to swarm {manifest.swarm_id.hex()[:12]}, not {swarm_id}")
        return manifest
    raise problems[0]


async def fetch_status(
    address: str, *, digest: bool = False, up_to: int | None = None, plaintext: bool = False
) -> dict[str, Any]:
    """Ask a node for its status, with digests of all that it has merged, and of that up to a round.

    Raises UnreachableError or ConfigError.
    """
    query = (["digest=1"] if digest else []) + ([f"up_to={up_to}"] if up_to is not None else [])
    body = await _ask(address, "status?" + "&".join(query), STATUS_BYTES_MAX, plaintext=plaintext)
    return parse_status(address, body)


def parse_status(address: str, body: bytes) -> dict[str, Any]:
    """Read a status answer. Raises UnreachableError."""
    try:
        status = json.loads(body)
    except (ValueError, RecursionError):
        status = None
    if not isinstance(status, dict) or not {"swarm_id", "node_id"} <= status.keys():
        raise UnreachableError(f"{address} sent a status that cannot be read")
    return status
