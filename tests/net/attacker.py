"""A member with a real key and real links that misbehaves on purpose, and what tests need beside it.

A `Member` signs records as a node would, and serves their payloads over the links that it has dialled, in the
way that the test sets. `knock` speaks the handshake by hand and keeps every byte that comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import aiohttp
import numpy as np

from gossamer.node.daemon.network.chunk_transfer import ENCODING_HEADER
from gossamer.node.daemon.network.links import PREFIX, SESSION_HEADER
from gossamer.node.daemon.network.sockets import client_context, fingerprint_of
from gossamer.protocol import messages as msg
from gossamer.protocol.access.handshake import HELLO_BYTES_MAX
from gossamer.protocol.errors import PeerError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.identity import Identity
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payloads import encode_payload, split_payload
from gossamer.protocol.records import Delta, RecordKind, open_envelope, parse_delta
from gossamer.protocol.wire import unpack
from tests.net.nodes import LocalNode
from tests.net.stranger import Stranger, linked
from tests.protocol.builders import body_of, row, signed


def impostor(claimed: bytes) -> Identity:
    """An identity that states another's public key and signs with its own."""
    return replace(Identity.from_seed(os.urandom(32)), public_key=claimed)


async def knock(address: str, hello: Callable[[bytes, bytes], bytes]) -> list[bytes]:
    """Send one hello by hand: `hello(challenge, binding)`.

    Returns all messages that came back, the challenge first, until the node hung up, or up to the Welcome if
    it let us in.
    """
    url = f"https://{address}{PREFIX}/link"
    async with (
        aiohttp.ClientSession() as http,
        http.ws_connect(url, ssl=client_context(), compress=0) as socket,
    ):
        tls = socket.get_extra_info("ssl_object")
        binding = fingerprint_of(tls.getpeercert(binary_form=True))
        heard = [await socket.receive_bytes(timeout=60)]
        await socket.send_bytes(hello(heard[0], binding))
        while (message := await socket.receive(timeout=60)).type is aiohttp.WSMsgType.BINARY:
            heard.append(message.data)
            if unpack(message.data, HELLO_BYTES_MAX)[0] is True:
                break
    await asyncio.sleep(0.05)  # aiohttp closes TLS connections a little later
    return heard


class Member:
    """A member that is linked to the nodes that it dials. Use as an async context manager."""

    def __init__(self, manifest: Manifest, identity: Identity | None = None, credential: bytes = b"") -> None:
        self.manifest = manifest
        self.layout = manifest.plan()
        self.identity = identity or Identity.from_seed(os.urandom(32))
        self.credential = credential
        self.links: dict[str, Stranger] = {}
        """The links that are still open, by address."""
        self.seen: dict[bytes, Delta] = {}
        """Deltas of others that came over any link, by record id."""
        self.chunks: dict[bytes, bytes] = {}
        """The chunks that it serves, by hash."""
        self.serve: Callable[[bytes], bytes | None] = self.chunks.get
        """Returns the bytes that it puts when asked for a chunk; None to decline."""
        self.encoding = ""
        """The encoding that it states for them, if any."""
        self.put_after_s = 0.0
        """How long it takes over each chunk, seconds; chunks of one link are sent one after another."""
        self.mute = False
        """Whether it does not answer requests for chunks at all."""
        self.answers: list[int] = []
        """HTTP status of each chunk that it put."""
        self.asked = 0
        self.on_seen: Callable[[Delta, str], list[msg.Message]] = lambda delta, address: []
        """Returns what it says to a node that has sent it a delta; called with the delta and the address."""
        self.relays = False
        """Whether it passes deltas on, as honest members do."""
        self._heartbeat = 0
        self._stack = contextlib.AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Member:
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._stack.aclose()

    @property
    def node_id(self) -> str:
        return self.identity.node_id.hex()

    async def link(self, *addresses: str) -> None:
        """Dial nodes. Raises PeerError, or TypeError if one hangs up."""
        for address in addresses:
            dialling = linked(address, self.manifest.swarm_id, self.identity, credential=self.credential)
            peer = await self._stack.enter_async_context(dialling)
            self.links[address] = peer
            self._tasks.append(asyncio.create_task(self._listen(address, peer)))

    async def say(self, message: msg.Message, *addresses: str) -> None:
        """Send a message to the nodes at these addresses, or to all."""
        data = msg.encode(message)
        for address in addresses or tuple(self.links):
            if address in self.links:
                await self.links[address].socket.send_bytes(data)

    async def present(self, **changes: Any) -> None:
        """Sign a newer row of our own and send it to all."""
        self._heartbeat += 1
        changes = {"heartbeat": self._heartbeat, "addresses": (), "name": "mallory", **changes}
        peer = row(self.identity, of=self.manifest, **changes)
        await self.say(msg.Records(((peer.data, False),)))

    def delta(self, round_: int, values: Iterable[Ints] | None = None, **changes: Any) -> Delta:
        """Sign a delta of these tensors (noise if none are given), and serve its payload."""
        codec = self.manifest.outer.codecs[0].name
        fragment = self.layout.of_round(round_)
        if values is None:
            rng = np.random.default_rng()
            values = [rng.integers(-1000, 1000, slot.numel, dtype=np.int32) for slot in fragment.slots]
        return self.delta_of(round_, encode_payload(codec, fragment, values), **changes)

    def delta_of(self, round_: int, payload: bytes, **changes: Any) -> Delta:
        """Sign a delta with exactly this payload, and serve it."""
        for chunk in split_payload(payload):
            self.chunks[sha256(chunk).digest()] = bytes(chunk)
        codec, fragments = self.manifest.outer.codecs[0].name, len(self.layout.fragments)
        body = body_of(payload, codec, round_, fragments, **changes)
        return signed(self.identity, body, self.manifest)

    async def publish(self, delta: Delta, *addresses: str) -> None:
        """Tell the nodes at these addresses, or all, of a delta."""
        await self.say(msg.Records(((delta.data, True),)), *addresses)

    # -- what the nodes say

    async def _listen(self, address: str, peer: Stranger) -> None:
        try:
            async for message in peer.socket:
                await self._heard(address, peer, msg.decode(message.data))
        except (ConnectionError, aiohttp.ClientError):
            pass
        finally:
            self.links.pop(address, None)

    async def _heard(self, address: str, peer: Stranger, message: msg.Message) -> None:
        match message:
            case msg.Ping():
                await peer.socket.send_bytes(msg.encode(msg.Ack(message.number)))
            case msg.Want():
                self.asked += 1
                data = self.serve(message.blob)
                if data is not None and not self.mute:
                    await self._put(peer, message.blob, data)
                elif not self.mute:
                    await peer.socket.send_bytes(msg.encode(msg.Decline(message.blob)))
            case msg.Records():
                for data, _ in message.entries:
                    await self._note(address, data)

    async def _note(self, address: str, data: bytes) -> None:
        if data[0] != RecordKind.DELTA:
            return
        delta = parse_delta(open_envelope(data, self.manifest.swarm_id), self.layout)
        is_new = delta.record_id not in self.seen
        self.seen[delta.record_id] = delta
        if self.relays and is_new:
            await self.say(
                msg.Records(((data, False),)), *(other for other in self.links if other != address)
            )
        for answer in self.on_seen(delta, address):
            await self.say(answer, address)

    async def _put(self, peer: Stranger, blob: bytes, data: bytes) -> None:
        await asyncio.sleep(self.put_after_s)
        url = f"{peer.base_url}/chunk/{blob.hex()}"
        headers = {SESSION_HEADER: peer.session.hex()}
        if self.encoding:
            headers[ENCODING_HEADER] = self.encoding
        async with peer.http.put(url, data=data, headers=headers) as answer:
            self.answers.append(answer.status)


async def refused(address: str, manifest: Manifest, identity: Identity, credential: bytes = b"") -> str:
    """The reason that a node gives for turning an identity away; fails if the node lets it in."""
    try:
        async with linked(address, manifest.swarm_id, identity, credential=credential):
            pass
    except PeerError as error:
        return str(error)
    raise AssertionError("it was let in")


def where(node: LocalNode) -> str:
    """The address at which a node really listens, behind its proxy."""
    facts = node.home.read_daemon()
    assert facts is not None
    return str(facts["address"])
