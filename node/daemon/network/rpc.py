"""Requests outside a link: a node's manifest and status, and owners' grants and revocations.

In an invited swarm the asker signs its request. A node proves to any asker that sends a nonce that the
channel is its own. `RpcServer` answers; `request` and what is below it ask.
"""

import asyncio
import json
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohappyeyeballs import start_connection
from aiohttp import web

from gossamer.node.address import Contact, check_is_swarm, parse_address, parse_contact
from gossamer.node.daemon.network.access import Access
from gossamer.node.daemon.network.links import PREFIX
from gossamer.node.daemon.network.sockets import LocalNode, Resolver, client_context, fingerprint_of, why_not
from gossamer.node.home import Home
from gossamer.protocol.access.handshake import NONCE_BYTES, ask, check_proof, check_question, prove
from gossamer.protocol.errors import (
    ConfigError,
    LocalError,
    MalformedError,
    NobodyThereError,
    NotAnsweredError,
    PeerError,
    UnreachableError,
)
from gossamer.protocol.identity import Identity, short
from gossamer.protocol.limits import (
    CREDENTIAL_BYTES_MAX,
    MANIFEST_BYTES_MAX,
    ROUND_MAX,
    STRANGER_TIMEOUT_S,
    TEXT_BYTES_MAX,
)

if TYPE_CHECKING:
    from gossamer.protocol.manifest import Manifest

ASK_HEADER = "Gossamer-Ask"
"""Hex of a signed request, see `protocol.access.handshake`."""

NONCE_HEADER = "Gossamer-Nonce"
PROOF_HEADER = "Gossamer-Proof"
"""Hex of 32 bytes from the asker, and of the proof which node answers."""

Status = Callable[[Mapping[str, str]], Awaitable[dict[str, Any]]]


class RpcServer:
    """Answers requests, or says why not. `status` takes a request's query and returns what becomes JSON."""

    def __init__(self, local: LocalNode, manifest: bytes, access: Access, status: Status) -> None:
        """`manifest` is in canonical bytes."""
        self._local = local
        self._manifest = manifest
        self._access = access
        self._status = status

    async def serve_manifest(self, request: web.Request) -> web.Response:
        self._check(request)
        return web.Response(body=self._manifest, content_type="application/octet-stream")

    async def serve_status(self, request: web.Request) -> web.Response:
        self._check(request)
        return web.json_response(await self._status(request.query))

    async def take_credential(self, request: web.Request) -> web.Response:
        if request.content_length is None or request.content_length > CREDENTIAL_BYTES_MAX:
            raise web.HTTPRequestEntityTooLarge(CREDENTIAL_BYTES_MAX, request.content_length or 0)
        try:
            data = await request.read()
            if self._access.is_stopping:
                raise web.HTTPServiceUnavailable(text="this node is stopping; use another one")
            self._access.deliver(data)
        except (PeerError, OSError, web.RequestPayloadError) as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        return web.Response(status=204)

    async def prove(self, request: web.Request, response: web.StreamResponse) -> None:
        """Prove to an asker that sends a nonce, with any request, that this channel is ours."""
        try:
            nonce = bytes.fromhex(request.headers.get(NONCE_HEADER, ""))
        except ValueError:
            return
        if len(nonce) == NONCE_BYTES:
            proof = prove(self._local.identity, self._local.fingerprint, nonce)
            response.headers[PROOF_HEADER] = proof.hex()

    def _check(self, request: web.Request) -> None:
        """Raise HTTPForbidden, with a reason, unless the asker may be answered."""
        if self._access.answers_anyone:
            return
        asked = request.headers.get(ASK_HEADER)
        if asked is None:
            raise web.HTTPForbidden(
                text="this swarm answers its members only: ask with --dir, as one of them"
            )
        local, path = self._local, request.path_qs
        try:
            asked_by = bytes.fromhex(asked)
            question = check_question(asked_by, local.swarm_id, local.fingerprint, time.time(), path)
            self._access.vet_question(question.node_id, question.credential)
        except (PeerError, ValueError) as error:
            raise web.HTTPForbidden(text=str(error)) from None


ASK_TIMEOUT_S = 10.0
"""For an answer to begin and, unless it may be long, to be complete."""

NEXT_ADDRESS_S = 0.25
"""The next of a name's addresses is tried too when one has not answered for this long (RFC 8305)."""


@dataclass(frozen=True, slots=True)
class Asker:
    """Whose key signs our requests, since an invited swarm answers only its members and owners."""

    identity: Identity
    swarm_id: bytes
    credential: bytes = b""


async def request(
    contact: Contact,
    path: str,
    bytes_max: int,
    *,
    plaintext: bool,
    asker: Asker | None = None,
    put: bytes | None = None,
    body_s: float = 0.0,
) -> bytes:
    """Make one request; returns the answer, which may take another `body_s` once it has begun.

    The request is pinned to the contact's node id if that is known, and signed if there is an `asker`.
    """
    address = contact.address
    scheme = "http" if plaintext else "https"
    try:
        connector = aiohttp.TCPConnector(resolver=Resolver())
        async with (
            asyncio.timeout(ASK_TIMEOUT_S) as limit,
            aiohttp.ClientSession(
                connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
            ) as session,
        ):
            is_bound = not plaintext and (asker is not None or contact.node_id is not None)
            binding = await fingerprint_at(address) if is_bound else b""
            nonce = os.urandom(NONCE_BYTES)
            headers = {NONCE_HEADER: nonce.hex()}
            if asker is not None:
                where = f"{PREFIX}/{path}"
                signed = ask(asker.identity, asker.swarm_id, binding, time.time(), where, asker.credential)
                headers[ASK_HEADER] = signed.hex()
            async with session.request(
                "GET" if put is None else "PUT",
                f"{scheme}://{address}{PREFIX}/{path}",
                data=put,
                headers=headers,
                ssl=aiohttp.Fingerprint(binding) if binding else not plaintext and client_context(),
                allow_redirects=False,
            ) as response:
                _check_who_answers(contact, response.headers.get(PROOF_HEADER, ""), binding, nonce)
                await _check_status(address, response)
                if body_s:
                    limit.reschedule(asyncio.get_running_loop().time() + body_s)
                body = await _read(response, bytes_max + 1)
            await connector.close(abort_ssl=True)  # else it waits until the node takes part in the closing
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        speaks = isinstance(error, ssl.SSLError | aiohttp.ClientResponseError)
        kind = UnreachableError if speaks else NobodyThereError
        why = _reason(error, plaintext)
        raise kind(f"no Gossamer node answers at {address} ({why}); is it running?") from None
    if len(body) > bytes_max:
        raise UnreachableError(f"{address} sent more than a node would")
    return body


async def fingerprint_at(address: str) -> bytes:
    """SHA-256 of the certificate shown at an address. Raises OSError."""
    host, port = parse_address(address)
    addresses = [
        (found["family"], socket.SOCK_STREAM, found["proto"], "", (found["host"], found["port"]))
        for found in await Resolver().resolve(host, port, socket.AF_UNSPEC)
    ]
    connection = await start_connection(addresses, happy_eyeballs_delay=NEXT_ADDRESS_S)
    _, writer = await asyncio.open_connection(sock=connection, ssl=client_context(), server_hostname="")
    try:
        return fingerprint_of(writer.get_extra_info("ssl_object").getpeercert(binary_form=True))
    finally:
        writer.transport.abort()


def _check_who_answers(contact: Contact, proof: str, binding: bytes, nonce: bytes) -> None:
    """Raise UnreachableError if the node that answers is not the one that the contact names."""
    if contact.node_id is None:
        return
    try:
        answers = check_proof(bytes.fromhex(proof), binding, nonce)
    except (PeerError, ValueError):
        raise UnreachableError(f"{contact.address} does not prove which node it is") from None
    if answers != contact.node_id:
        raise UnreachableError(
            f"{contact.address} is node {short(answers)}, not {short(contact.node_id)} as you were told"
        )


async def _check_status(address: str, response: aiohttp.ClientResponse) -> None:
    if (status := response.status) in (200, 204):
        return
    text = (await _read(response, TEXT_BYTES_MAX)).decode("utf-8", "replace")
    if status in (400, 403) and text.isprintable():
        raise NotAnsweredError(f"{address} refuses: {text}")
    if status in (429, 503) and text.isprintable():
        raise UnreachableError(f"{address} cannot answer: {text}")
    raise UnreachableError(f"{address} is not a Gossamer node (HTTP status {status})")


async def _read(response: aiohttp.ClientResponse, bytes_max: int) -> bytes:
    body = b""
    while len(body) < bytes_max and (more := await response.content.read(bytes_max - len(body))):
        body += more
    return body


def _reason(error: Exception, plaintext: bool) -> str:
    if isinstance(error, ssl.SSLError):
        return "the server there does not speak TLS: is this a node's address, and not its admin page's?"
    if plaintext and isinstance(error, aiohttp.ServerDisconnectedError):
        return "the connection was closed: the node may speak TLS (leave out --insecure-plaintext)"
    if isinstance(error, aiohttp.ClientResponseError):
        return "the server there does not speak HTTP"
    if isinstance(error, OSError) and error.errno:
        return why_not(error)
    return "no answer in time" if isinstance(error, TimeoutError) else "the connection was closed"


def asker_of(home: Home) -> Asker:
    """Ask as the node in a folder. Raises ConfigError or StorageError."""
    manifest, invitation = home.manifest(), home.invitation()
    swarm = manifest or invitation
    if swarm is None:
        raise ConfigError(f"there is no node in {home.root}; name a node's folder with --dir")
    return Asker(home.identity(), swarm.swarm_id, invitation.grant.data if invitation else b"")


def asker_in(folder: Path | None) -> Asker | None:
    """Ask as the node in a folder; as nobody without one. Raises ConfigError or StorageError."""
    return None if folder is None else asker_of(Home(folder))


_HASHES = frozenset({"swarm_id", "node_id", "ledger_digest", "merged_digest", "phi_digest", "average_digest"})
"""The ids and digests in a status, all of them text."""

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
        where = (contact, "manifest", MANIFEST_BYTES_MAX)
        asking = request(*where, plaintext=plaintext, asker=asker, body_s=STRANGER_TIMEOUT_S)
        try:
            answer = asyncio.run(asking)
            manifest = from_canonical(answer)
            check_is_swarm(manifest.swarm_id, swarm_id, f"{contact.address} belongs to")
        except (UnreachableError, ConfigError) as error:
            problems.append(error)
        except MalformedError as error:
            problems.append(ConfigError(f"{contact.address} sent a manifest that cannot be used: {error}"))
        else:
            return manifest
    raise next((problem for problem in problems if not isinstance(problem, NobodyThereError)), problems[0])


async def fetch_status(
    address: str,
    *,
    digest: bool = False,
    up_to: int | None = None,
    skip: int | None = None,
    plaintext: bool = False,
    asker: Asker | None = None,
) -> dict[str, Any]:
    """Ask a node for its status, optionally with digests of all that is merged, and of that up to a round;
    with as many members as one answer holds after the first `skip`, or with those that matter most.

    Raises UnreachableError or ConfigError.
    """
    query = (["digest=1"] if digest else []) + ([f"up_to={up_to}"] if up_to is not None else [])
    query += [f"members={ROUND_MAX}", f"skip={skip}"] if skip is not None else []
    path = "status" + ("?" + "&".join(query) if query else "")
    contact = parse_contact(address)
    answer = await request(contact, path, STATUS_BYTES_MAX, plaintext=plaintext, asker=asker)
    return parse_status(address, answer)


async def deliver(address: str, credential: bytes, *, plaintext: bool = False) -> None:
    """Hand a grant or a revocation to a node. Raises UnreachableError or ConfigError."""
    await request(parse_contact(address), "credential", 0, plaintext=plaintext, put=credential)


def parse_status(address: str, body: bytes) -> dict[str, Any]:
    """Read a status answer. Raises UnreachableError."""
    try:
        status = json.loads(body, parse_constant=int)  # no infinities: int raises ValueError
    except (ValueError, RecursionError):
        status = None
    if isinstance(status, dict) and {"swarm_id", "node_id"} <= status.keys():
        if all(isinstance(status.get(name, ""), str) for name in _HASHES):
            return status
    raise UnreachableError(f"{address} sent a status that cannot be read")
