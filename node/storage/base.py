"""The base under the rounds that can still change: closed history, in three numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.protocol.claims import chain, total
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.merging.token_count import TokenCount
from gossamer.protocol.records import Delta

Rounds = Mapping[int, tuple[Delta, ...]]
"""The records that are merged, by round."""

Digests = Mapping[int, bytes]
"""The digests of the merged records, by round, see `protocol.history.round_digest`."""


@dataclass(frozen=True, slots=True)
class Base:
    """All of history up to `round`, under the rounds that can still change."""

    round: int
    chain: bytes
    """Digest of the records merged up to the round, see `protocol.history.chain`."""
    tokens: int
    """The tokens that all those deltas count for, as stated in claims; see `token_count` and
    `Layout.trained_tokens`."""

    def chain_with(self, digests: Digests) -> bytes:
        """Digest of all merged records if these rounds lie on this base. Equal digests promise equal Phi."""
        digest = self.chain
        for round_ in sorted(digests):
            digest = chain(digest, round_, digests[round_])
        return digest

    def tokens_with(self, rounds: Rounds, manifest: Manifest) -> int:
        """The tokens that all merged records count for if these rounds lie on this base."""
        above = TokenCount(manifest, (delta for deltas in rounds.values() for delta in deltas))
        return total((self.tokens, above.total))


GENESIS = Base(0, bytes(32), 0)
