"""Asking a running node for its manifest and its status, and handing it credentials."""

import asyncio
import json
import re
from math import isfinite
from typing import TYPE_CHECKING, Any

from gossamer.node.address import Contact, check_is_swarm, parse_contact
from gossamer.node.network.asking import Asker, request
from gossamer.protocol.errors import (
    ConfigError,
    LocalError,
    MalformedError,
    NobodyThereError,
    UnreachableError,
    UnsupportedError,
)
from gossamer.protocol.limits import MANIFEST_BYTES_MAX, STRANGER_TIMEOUT_S

if TYPE_CHECKING:
    from gossamer.protocol.manifest import Manifest

_HASHES = frozenset({"swarm_id", "node_id", "ledger_digest", "merged_digest", "phi_digest"})
_HASH = re.compile("[0-9A-Za-z]*")
"""Form of the ids and digests in a status: nothing that a terminal would interpret."""

STATUS_BYTES_MAX = 16 * 1024 * 1024


def fetch_manifest(
    contacts: tuple[Contact, ...], swarm_id: str | None, *, plaintext: bool, asker: Asker | None = None
) -> "Manifest":
    """Get the manifest from the first contact that answers, of the swarm `swarm_id` if one is given.

    Raises ConfigError or UnreachableError; NobodyThereError only if waiting may help with every contact.
    """
    from gossamer.protocol.manifest import from_canonical  # imports NumPy, which other questions do without

    problems: list[LocalError] = []
    for contact in contacts:
        try:
            answer = asyncio.run(
                request(
                    contact,
                    "manifest",
                    MANIFEST_BYTES_MAX,
                    plaintext=plaintext,
                    asker=asker,
                    body_s=STRANGER_TIMEOUT_S,
                )
            )
            manifest = from_canonical(answer.body)
        except UnreachableError as error:
            problems.append(error)
            continue
        except UnsupportedError as error:
            raise ConfigError(
                f"{contact.address} sent a manifest that this release cannot use ({error}): run the release"
                " that it runs"
            ) from None
        except MalformedError as error:
            raise ConfigError(f"{contact.address} sent a manifest that cannot be used: {error}") from None
        try:
            check_is_swarm(manifest.swarm_id, swarm_id, f"{contact.address} belongs to")
        except ConfigError as error:
            problems.append(error)
            continue
        return manifest
    raise next((problem for problem in problems if not isinstance(problem, NobodyThereError)), problems[0])


async def fetch_status(
    address: str,
    *,
    digest: bool = False,
    up_to: int | None = None,
    plaintext: bool = False,
    asker: Asker | None = None,
) -> dict[str, Any]:
    """Ask a node for its status, optionally with digests of all that is merged, and of that up to a round.

    Raises UnreachableError or ConfigError.
    """
    query = (["digest=1"] if digest else []) + ([f"up_to={up_to}"] if up_to is not None else [])
    path = "status" + ("?" + "&".join(query) if query else "")
    contact = parse_contact(address)
    answer = await request(contact, path, STATUS_BYTES_MAX, plaintext=plaintext, asker=asker)
    return parse_status(address, answer.body)


async def probe_status(
    contact: Contact, *, plaintext: bool = False, asker: Asker | None = None
) -> tuple[dict[str, Any], float | None]:
    """A node's status, and how many seconds its clock is ahead of ours, if it tells.

    Raises UnreachableError or ConfigError.
    """
    answer = await request(contact, "status", STATUS_BYTES_MAX, plaintext=plaintext, asker=asker)
    return parse_status(contact.address, answer.body), answer.clock_offset_s


async def deliver(address: str, credential: bytes, *, plaintext: bool = False) -> None:
    """Hand a grant or a revocation to a node. Raises UnreachableError or ConfigError."""
    await request(parse_contact(address), "credential", 0, plaintext=plaintext, put=credential)


def parse_status(address: str, body: bytes) -> dict[str, Any]:
    """Read a status answer. Raises UnreachableError."""
    try:
        status = json.loads(body, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        status = None
    if not isinstance(status, dict) or not {"swarm_id", "node_id"} <= status.keys():
        raise UnreachableError(f"{address} sent a status that cannot be read")
    for name in sorted(_HASHES & status.keys()):
        if not isinstance(status[name], str) or not _HASH.fullmatch(status[name]):
            raise UnreachableError(f"{address} sent a status that cannot be read: its {name} is not a hash")
    return status


def _finite(text: str) -> float:
    """Parse a number of JSON, which allows only finite ones. Raises ValueError."""
    value = float(text)
    if not isfinite(value):
        raise ValueError(text)
    return value
