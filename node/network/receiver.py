"""What the transport asks of the node that it works for: three interfaces, without implementation."""

from typing import Protocol

from gossamer.node.network.link import PeerLink
from gossamer.protocol.payloads.packing import Chunk


class Receiver(Protocol):
    """Takes links as they come and go, and the messages that they carry."""

    def link_up(self, link: PeerLink) -> None: ...

    def link_down(self, link: PeerLink) -> None: ...

    async def message(self, link: PeerLink, data: bytes) -> None: ...


class Chunks(Protocol):
    """Gives chunks to linked peers, and takes those that we want from them."""

    def expected_size(self, blob: bytes) -> int | None:
        """The largest size of a chunk that we want now, None for any other."""
        ...

    async def can_keep(self) -> bool:
        """Whether a chunk that comes now could be stored. If none can, the answer takes a moment."""
        ...

    async def chunk_arrived(self, blob: bytes, data: bytes) -> bool:
        """A wanted chunk has come, and its hash is right. Returns whether it could be stored."""
        ...

    def chunk_failed(self, link: PeerLink, blob: bytes) -> None:
        """A peer did not bring a chunk, or brought a wrong one: there is no need to wait for it."""
        ...

    def holds(self, blob: bytes) -> bool:
        """Whether a chunk is here, as far as is known without reading it."""
        ...

    async def read_chunk(self, blob: bytes) -> Chunk | None: ...


class Admission(Protocol):
    """Decides who may link to us and who may ask us questions."""

    @property
    def answers_anyone(self) -> bool:
        """Whether strangers may ask for the manifest and the status."""
        ...

    @property
    def is_stopping(self) -> bool:
        """Whether what is delivered now might not be kept."""
        ...

    def own_credential(self) -> bytes:
        """The credential that we show to others to be let in."""
        ...

    def vet(self, node_id: bytes, credential: bytes) -> None:
        """Check that a node may link to us. Raises RefusedError."""
        ...

    def vet_question(self, node_id: bytes, credential: bytes) -> None:
        """Check that a node may ask how we are doing. Raises RefusedError."""
        ...

    def deliver(self, credential: bytes) -> None:
        """Take in a grant or revocation from anybody. Raises PeerError if no owner has signed it."""
        ...
