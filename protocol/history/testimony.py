"""What the other members say about the past, as far as `Sealing` needs to know it."""

from collections.abc import Sequence
from math import inf
from typing import NamedTuple, Protocol

from gossamer.protocol.claims import Claim, Claims


class Witness(NamedTuple):
    """A live member's word about the past."""

    claims: tuple[Claim, ...]
    node_id: bytes = b""
    is_named: bool = False
    """Whether it answers at one of the join addresses that we were given."""
    told_at: float = inf
    """When its newest row came, by the local clock, seconds."""
    round: int = 0
    """The last round that it has published; 0 if none since it came (back), or if we know no delta of its."""
    trains: bool = True


class Testimony(Protocol):
    """Answers what `Sealing` asks during one look. Each answer is computed only when asked for."""

    def witnesses(self) -> Sequence[Witness]:
        """The live members."""

    def contributors(self) -> Sequence[Claims]:
        """The claims of each author of a delta whose payload is here, live or not."""

    def authors(self) -> int:
        """How many members take part, present or not: see `company`."""

    def share_lacking(self, round_: int, now: float) -> float:
        """The share, 0 to 1, of authors with payloads up to a round that another node holds and we lack."""
