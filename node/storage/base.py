"""What lies under the rounds that can still change: closed history, in three numbers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gossamer.protocol.history import chain, total
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
    """Of all those deltas together, as claims state them; see `Layout.trained_tokens`."""

    def chain_with(self, digests: Digests) -> bytes:
        """Digest of all records merged if these rounds lie upon it: equal digests promise equal Phi."""
        digest = self.chain
        for round_ in sorted(digests):
            digest = chain(digest, round_, digests[round_])
        return digest

    def tokens_with(self, rounds: Rounds) -> int:
        """Tokens of all records merged if these rounds lie upon it."""
        return total((self.tokens, *map(tokens_of, rounds.values())))


GENESIS = Base(0, bytes(32), 0)


def tokens_of(deltas: Iterable[Delta]) -> int:
    """Tokens of some deltas together."""
    return sum(delta.body.tokens for delta in deltas)
