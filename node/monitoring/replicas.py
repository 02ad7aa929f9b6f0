"""Whether the others hold the same model as this node, as far as their claims and ours can tell.

Snapshots of a round do not appear everywhere at once, and a node that lags behind has older ones. So each
replica is compared with ours at the newest round of which both have a snapshot.
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, NamedTuple

from gossamer.protocol.claims import Claim


class Likeness(StrEnum):
    """How another's replica compares with ours at one round."""

    SAME = "same"
    RECORDS = "records"
    """The node has merged other records up to that round: a late record has so far reached only one of us."""

    OTHER = "other"
    """The node claims to have merged the same records, and holds a different model."""


class Comparison(NamedTuple):
    """How two replicas compare at the newest round of which both have a snapshot."""

    round: int
    likeness: Likeness


def compare(ours: Iterable[Claim], theirs: Iterable[Claim]) -> Comparison | None:
    """Compare our replica with another; None if there is no round of which both have a snapshot."""
    own_at = {claim.round: claim for claim in ours}
    other = max((claim for claim in theirs if claim.round in own_at), default=None)
    if other is None:
        return None
    own = own_at[other.round]
    if own.digest != other.digest:
        return Comparison(other.round, Likeness.RECORDS)
    return Comparison(other.round, Likeness.SAME if own.root == other.root else Likeness.OTHER)


def summary(ours: Iterable[Claim], found: Iterable[Comparison | None]) -> dict[str, Any]:
    """The comparisons with all others in sum: ``{"same", "of", "rounds", "digest"}``.

    `same` is how many hold the same model, `of` how many could be compared, `rounds` the oldest and the
    newest round at which they were, and `digest` the root of our snapshot of the newest. The last two are
    None if none could be compared.
    """
    compared = [comparison for comparison in found if comparison is not None]
    rounds = [comparison.round for comparison in compared]
    newest = max(rounds, default=None)
    return {
        "same": sum(comparison.likeness is Likeness.SAME for comparison in compared),
        "of": len(compared),
        "rounds": [min(rounds), newest] if rounds else None,
        "digest": next((claim.root.hex() for claim in ours if claim.round == newest), None),
    }
