"""Who speaks: two nodes prove their keys to each other before a link carries anything else.

::

    server -> Challenge(version, server public key, nonce)
    client -> Hello(version, swarm id, client public key, nonce, signature, credential)
    server -> Welcome(signature, session, credential)          or Refused(reason)

Both sign the same transcript under different roles: protocol version, swarm id, both keys, both nonces, and
the *channel binding* (the TLS certificate's fingerprint, empty on plain loopback). So a hello can be neither
replayed nor relayed to another channel. The session token, which the server signs too, authenticates the HTTP
requests that belong to the link. A credential is a grant (see `acl`), or empty. Each side judges the
other with `Vet` before anything else is said.

**Questions from outside any link** (the manifest, the status) are signed over the channel, the time and what
is asked. So an invited swarm can answer only members and owners, without a round trip for a challenge, and
the question cannot be replayed on another channel, or later than a few minutes. An answer carries the
answering node's signature over the channel and the asker's nonce. So an asker that was told a node id
beforehand can insist on it from the very first contact.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gossamer.protocol.errors import MalformedError, RefusedError, SignatureError
from gossamer.protocol.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, node_id_of, verify
from gossamer.protocol.limits import ASK_FRESH_S, CREDENTIAL_BYTES_MAX, UNIX_S_MAX
from gossamer.protocol.unix_time import span
from gossamer.protocol.wire import blob, boolean, integer, pack, take, text, unpack, values

PROTOCOL_VERSION = 2
NONCE_BYTES = 32
SESSION_BYTES = 32
HELLO_BYTES_MAX = 4096

_CLIENT, _SERVER = b"client", b"server"

Vet = Callable[[bytes, bytes], None]
"""Called with the peer's proven node id and its credential; raises RefusedError to turn it away."""


_KEY, _SIGNATURE = blob(PUBLIC_KEY_BYTES), blob(SIGNATURE_BYTES)
_NONCE, _SESSION = blob(NONCE_BYTES), blob(SESSION_BYTES)
_CREDENTIAL = blob(0, CREDENTIAL_BYTES_MAX)
_VERSION = integer(PROTOCOL_VERSION, PROTOCOL_VERSION)


def _unpack(data: bytes) -> Any:
    """Raises RefusedError if the peer refuses us, or speaks another version, whose fields may be any."""
    value = unpack(data, HELLO_BYTES_MAX)
    first = value[0] if isinstance(value, list) and value else None
    if first is False:
        raise RefusedError(take(value, "refusal", boolean, text())[1])
    if type(first) is int and first != PROTOCOL_VERSION:
        raise RefusedError(f"the peer speaks protocol version {first}, this node {PROTOCOL_VERSION}")
    return value


@dataclass(frozen=True, slots=True)
class _Transcript:
    swarm_id: bytes
    server_key: bytes
    client_key: bytes
    server_nonce: bytes
    client_nonce: bytes
    binding: bytes

    def signed_by(self, role: bytes) -> bytes:
        return b"gossamer/1 hello " + role + pack([PROTOCOL_VERSION, *values(self)])


@dataclass
class _Side:
    identity: Identity
    swarm_id: bytes
    binding: bytes
    nonce: bytes
    """Fresh random bytes from the caller."""
    credential: bytes = field(default=b"", kw_only=True)
    vet: Vet = field(kw_only=True)
    peer_credential: bytes = field(default=b"", init=False)
    """What the peer showed, once the handshake is over."""


@dataclass
class ServerHandshake(_Side):
    """The accepting side."""

    session: bytes
    """Fresh random bytes from the caller."""

    def challenge(self) -> bytes:
        return pack([PROTOCOL_VERSION, self.identity.public_key, self.nonce])

    def answer(self, hello: bytes) -> tuple[bytes, bytes]:
        """Check a Hello; returns the peer's node id and the Welcome to send.

        Raises RefusedError (whose message may be sent with `refusal`), MalformedError or SignatureError.
        """
        _, swarm_id, client_key, nonce, signature, self.peer_credential = take(
            _unpack(hello), "hello", _VERSION, blob(32), _KEY, _NONCE, _SIGNATURE, _CREDENTIAL
        )
        if swarm_id != self.swarm_id:
            raise RefusedError(
                f"this node belongs to swarm {self.swarm_id.hex()[:12]}, not {swarm_id.hex()[:12]}"
            )
        transcript = _Transcript(
            swarm_id, self.identity.public_key, client_key, self.nonce, nonce, self.binding
        )
        verify(client_key, signature, transcript.signed_by(_CLIENT))
        node_id = node_id_of(client_key)
        self.vet(node_id, self.peer_credential)
        own = self.identity.sign(transcript.signed_by(_SERVER) + self.session)
        return node_id, pack([True, own, self.session, self.credential])


def refusal(reason: str) -> bytes:
    """The last message of a handshake that we refuse."""
    return pack([False, reason])


@dataclass
class ClientHandshake(_Side):
    """The dialling side."""

    expected: bytes | None
    """The node id that must answer, if it is known."""
    _transcript: _Transcript | None = field(default=None, init=False)

    def hello(self, challenge: bytes) -> bytes:
        """Answer the server's Challenge. Raises MalformedError, RefusedError or SignatureError."""
        _, server_key, nonce = take(_unpack(challenge), "challenge", _VERSION, _KEY, _NONCE)
        if self.expected is not None and node_id_of(server_key) != self.expected:
            raise SignatureError("the node that answers at this address is not the one we dialled")
        own_key = self.identity.public_key
        self._transcript = _Transcript(self.swarm_id, server_key, own_key, nonce, self.nonce, self.binding)
        signature = self.identity.sign(self._transcript.signed_by(_CLIENT))
        return pack([PROTOCOL_VERSION, self.swarm_id, own_key, self.nonce, signature, self.credential])

    def finish(self, welcome: bytes) -> tuple[bytes, bytes]:
        """Check the Welcome; returns the peer's node id and our session token.

        Raises RefusedError with the peer's reason or ours, MalformedError or SignatureError.
        """
        if self._transcript is None:
            raise MalformedError("welcome before challenge")
        _, signature, session, self.peer_credential = take(
            _unpack(welcome), "welcome", boolean, _SIGNATURE, _SESSION, _CREDENTIAL
        )
        verify(self._transcript.server_key, signature, self._transcript.signed_by(_SERVER) + session)
        node_id = node_id_of(self._transcript.server_key)
        self.vet(node_id, self.peer_credential)
        return node_id, session


# --- Questions from outside any link.

ASK_BYTES_MAX = 2048


class Asker(NamedTuple):
    """Who signed a question."""

    node_id: bytes
    credential: bytes
    """Its grant, or empty. Not judged yet."""


def _question(swarm_id: bytes, binding: bytes, unix_s: int, path: str) -> bytes:
    return b"gossamer/1 ask" + pack([swarm_id, binding, unix_s, path])


def _answer(binding: bytes, nonce: bytes) -> bytes:
    return b"gossamer/1 answer" + pack([binding, nonce])


def ask(
    identity: Identity, swarm_id: bytes, binding: bytes, unix_s: float, path: str, credential: bytes
) -> bytes:
    """Sign a question. `binding` is the server certificate's SHA-256, empty without TLS."""
    signature = identity.sign(_question(swarm_id, binding, int(unix_s), path))
    return pack([int(unix_s), identity.public_key, signature, credential])


def check_question(data: bytes, swarm_id: bytes, binding: bytes, unix_s: float, path: str) -> Asker:
    """Check a question; returns who asks. Raises MalformedError, SignatureError, or RefusedError if it was
    signed more than `ASK_FRESH_S` from now."""
    asked, public_key, signature, credential = take(
        unpack(data, ASK_BYTES_MAX), "question", integer(0, UNIX_S_MAX), _KEY, _SIGNATURE, _CREDENTIAL
    )
    if abs(asked - unix_s) > ASK_FRESH_S:
        raise RefusedError(f"our clocks differ by {span(abs(asked - unix_s))}; set the one that is wrong")
    try:
        verify(public_key, signature, _question(swarm_id, binding, asked, path))
    except SignatureError:
        raise SignatureError(
            f"this node belongs to swarm {swarm_id.hex()[:12]}, but another one was asked for; or somebody"
            " is in the middle"
        ) from None
    return Asker(node_id_of(public_key), credential)


def prove(identity: Identity, binding: bytes, nonce: bytes) -> bytes:
    """Prove to an asker that sent a nonce that this channel is ours."""
    return pack([identity.public_key, identity.sign(_answer(binding, nonce))])


def check_proof(data: bytes, binding: bytes, nonce: bytes) -> bytes:
    """The node id of the node that answers. Raises MalformedError or SignatureError."""
    public_key, signature = take(unpack(data, ASK_BYTES_MAX), "proof", _KEY, _SIGNATURE)
    verify(public_key, signature, _answer(binding, nonce))
    return node_id_of(public_key)
