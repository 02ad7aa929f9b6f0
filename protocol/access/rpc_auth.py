"""Questions from outside any link (the manifest, the status), and proof of which node answers.

A question is signed over the channel, the time and what is asked. So an invited swarm can answer only members
and owners, without a round trip for a challenge, and the question cannot be replayed on another channel, or
later than a few minutes. An answer carries the answering node's signature over the channel and the asker's
nonce. So an asker that was told a node id beforehand can insist on it from the very first contact.
"""

from dataclasses import dataclass

from gossamer.protocol.errors import RefusedError, SignatureError
from gossamer.protocol.identity import PUBLIC_KEY_BYTES, SIGNATURE_BYTES, Identity, node_id_of, verify
from gossamer.protocol.limits import ASK_FRESH_S, CREDENTIAL_BYTES_MAX, UNIX_S_MAX
from gossamer.protocol.unix_time import span
from gossamer.protocol.wire import Fields, pack, unpack

ASK_BYTES_MAX = 2048


@dataclass(frozen=True, slots=True)
class Question:
    """What a signed question proves."""

    node_id: bytes
    credential: bytes
    """The asker's grant, or empty. Not judged yet."""


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


def check_question(data: bytes, swarm_id: bytes, binding: bytes, unix_s: float, path: str) -> Question:
    """Check a question; returns who asks. Raises MalformedError, SignatureError, or RefusedError if it was
    signed more than `ASK_FRESH_S` from now."""
    fields = Fields(unpack(data, ASK_BYTES_MAX), "question")
    asked = fields.integer("unix_s", 0, UNIX_S_MAX)
    public_key = fields.blob("public_key", PUBLIC_KEY_BYTES)
    signature = fields.blob("signature", SIGNATURE_BYTES)
    credential = fields.blob("credential", 0, CREDENTIAL_BYTES_MAX)
    fields.end()
    if abs(asked - unix_s) > ASK_FRESH_S:
        raise RefusedError(f"our clocks differ by {span(abs(asked - unix_s))}; set the one that is wrong")
    try:
        verify(public_key, signature, _question(swarm_id, binding, asked, path))
    except SignatureError:
        raise SignatureError(
            f"this node belongs to swarm {swarm_id.hex()[:12]}, but another one was asked for; or somebody"
            " is in the middle"
        ) from None
    return Question(node_id_of(public_key), credential)


def prove(identity: Identity, binding: bytes, nonce: bytes) -> bytes:
    """Prove to an asker that sent a nonce that this channel is ours."""
    return pack([identity.public_key, identity.sign(_answer(binding, nonce))])


def check_proof(data: bytes, binding: bytes, nonce: bytes) -> bytes:
    """The node id of the node that answers. Raises MalformedError or SignatureError."""
    fields = Fields(unpack(data, ASK_BYTES_MAX), "proof")
    public_key = fields.blob("public_key", PUBLIC_KEY_BYTES)
    signature = fields.blob("signature", SIGNATURE_BYTES)
    fields.end()
    verify(public_key, signature, _answer(binding, nonce))
    return node_id_of(public_key)
