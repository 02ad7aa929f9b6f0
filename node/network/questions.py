"""Questions from outside any link: the manifest, the status, and owners' grants and revocations.

In an invited swarm the asker signs the question. A node that answers proves that the channel is its own to
any asker that sends a nonce. `client` is the other end.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from gossamer.node.network.receiver import Admission
from gossamer.protocol.admission.ask import check_question, prove
from gossamer.protocol.admission.handshake import NONCE_BYTES
from gossamer.protocol.errors import PeerError
from gossamer.protocol.identity import Identity
from gossamer.protocol.limits import CREDENTIAL_BYTES_MAX

BODY_TIMEOUT_S = 10.0
"""A credential is a few hundred bytes: a sender that takes longer is not waited for."""

ASK_HEADER = "Gossamer-Ask"
"""Hex of a signed question, see `protocol.admission.ask`."""

NONCE_HEADER = "Gossamer-Nonce"
PROOF_HEADER = "Gossamer-Proof"
"""Hex of 32 bytes from the asker, and of the proof which node answers."""

Status = Callable[[Mapping[str, str]], Awaitable[dict[str, Any]]]


class Questions:
    """Answers questions, or says why not. `status` takes a request's query and returns what becomes JSON."""

    def __init__(
        self,
        identity: Identity,
        swarm_id: bytes,
        fingerprint: bytes,
        manifest: bytes,
        admission: Admission,
        status: Status,
    ) -> None:
        """`fingerprint` is that of our certificate, empty without TLS; `manifest` is in canonical bytes."""
        self._identity = identity
        self._swarm_id = swarm_id
        self._fingerprint = fingerprint
        self._manifest = manifest
        self._admission = admission
        self._status = status

    async def serve_manifest(self, request: web.Request) -> web.Response:
        self._vet(request)
        return web.Response(body=self._manifest, content_type="application/octet-stream")

    async def serve_status(self, request: web.Request) -> web.Response:
        self._vet(request)
        return web.json_response(await self._status(request.query))

    async def take_credential(self, request: web.Request) -> web.Response:
        if request.content_length is None or request.content_length > CREDENTIAL_BYTES_MAX:
            raise web.HTTPRequestEntityTooLarge(CREDENTIAL_BYTES_MAX, request.content_length or 0)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                data = await request.read()
            if self._admission.is_stopping:
                raise web.HTTPServiceUnavailable(text="this node is stopping; use another one")
            self._admission.deliver(data)
        except (PeerError, OSError, TimeoutError, web.RequestPayloadError) as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        return web.Response(status=204)

    async def prove(self, request: web.Request, response: web.StreamResponse) -> None:
        """Prove to an asker that sends a nonce, with any request, that this channel is ours."""
        try:
            nonce = bytes.fromhex(request.headers.get(NONCE_HEADER, ""))
        except ValueError:
            return
        if len(nonce) == NONCE_BYTES:
            response.headers[PROOF_HEADER] = prove(self._identity, self._fingerprint, nonce).hex()

    def _vet(self, request: web.Request) -> None:
        """Raise HTTPForbidden, with a reason, unless the asker may be answered."""
        if self._admission.answers_anyone:
            return
        asked = request.headers.get(ASK_HEADER)
        if asked is None:
            raise web.HTTPForbidden(text="this swarm answers its members only")
        try:
            question = check_question(
                bytes.fromhex(asked), self._swarm_id, self._fingerprint, time.time(), request.path_qs
            )
            self._admission.vet_question(question.node_id, question.credential)
        except (PeerError, ValueError) as error:
            raise web.HTTPForbidden(text=str(error)) from None
