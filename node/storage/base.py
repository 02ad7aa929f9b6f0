"""What lies under the rounds that can still change: closed history, in three numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

from gossamer.protocol.claims import chain, total
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.merging.token_count import TokenCount
from gossamer.protocol.records import Delta

Rounds = Mapping[int, tuple[Delta, ...]]
"""Which records are merged, by round."""

Digests = Mapping[int, bytes]
"""The digests of those, by round, see `protocol.history.round_digest`."""


@dataclass(frozen=True, slots=True)
class Base:
    """What lies under the rounds that can still change: all of history up to `round`."""

    round: int
    chain: bytes
    """Digest of the records merged up to the round, see `protocol.history.chain`."""
    tokens: int
    """What all those deltas count for, as claims state it; see `token_count` and `Layout.trained_tokens`."""

    def chain_with(self, digests: Digests) -> bytes:
        """Digest of all records merged if these rounds lie upon it: equal digests promise equal Phi."""
        digest = self.chain
        for round_ in sorted(digests):
            digest = chain(digest, round_, digests[round_])
        return digest

    def tokens_with(self, rounds: Rounds, manifest: Manifest) -> int:
        """What all records merged count for if these rounds lie upon it."""
        above = TokenCount(manifest, (delta for deltas in rounds.values() for delta in deltas))
        return total((self.tokens, above.total))


GENESIS = Base(0, bytes(32), 0)
