"""The invitation that an owner hands to a new member: one line of text with everything needed to join.

It is ``gossamer-invitation:`` and base64url of msgpack ``[swarm id, grant's envelope, contacts]``, where
contacts are members' addresses as `--join` takes them. It is no secret: only the node that it names can use
it.
"""

import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass

from gossamer.protocol.admission.charter import Grant, parse_grant
from gossamer.protocol.envelope import HEADER_BYTES, Kind, open_envelope
from gossamer.protocol.errors import ConfigError, PeerError
from gossamer.protocol.limits import ADDRESSES_PER_PEER_MAX, CREDENTIAL_BYTES_MAX
from gossamer.protocol.wire import Fields, pack, unpack

PREFIX = "gossamer-invitation:"
INVITATION_BYTES_MAX = 8192


@dataclass(frozen=True, slots=True)
class Invitation:
    """A grant, the swarm that it is for, and addresses of members of that swarm."""

    swarm_id: bytes
    grant: Grant
    contacts: tuple[str, ...]

    def to_text(self) -> str:
        packed = pack([self.swarm_id, self.grant.data, self.contacts])
        return PREFIX + urlsafe_b64encode(packed).decode()


def read_invitation(text: str) -> Invitation:
    """Inverse of `Invitation.to_text`. Raises ConfigError.

    The grant's signature is checked here. Whether its signer is an owner can be told only from the manifest.
    """
    words = "".join(text.replace(">", " ").split())  # mail programs break long lines and mark quotes
    if not words.startswith(PREFIX) or len(words) > INVITATION_BYTES_MAX:
        raise ConfigError(f"that is not an invitation; one begins with {PREFIX}")
    try:
        fields = Fields(unpack(urlsafe_b64decode(words.removeprefix(PREFIX)), INVITATION_BYTES_MAX), "it")
        swarm_id = fields.blob("swarm_id", 32)
        envelope = open_envelope(fields.blob("grant", HEADER_BYTES, CREDENTIAL_BYTES_MAX), swarm_id)
        contacts = fields.texts("contacts", ADDRESSES_PER_PEER_MAX)
        fields.end()
        if envelope.kind is not Kind.GRANT:
            raise ConfigError("that invitation grants nothing")
        return Invitation(swarm_id, parse_grant(envelope), contacts)
    except (PeerError, binascii.Error, ValueError) as error:
        raise ConfigError(f"that invitation is damaged ({error}); was all of it copied?") from None
