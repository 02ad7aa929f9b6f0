"""The processes that train one model, as their peer sees them: a `Team`, and the `Word` on which its ranks
agree at each step boundary. Most nodes are a team of one, `Alone`; several are `ranks.Ranks`."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

from torch import Tensor

from gossamer.protocol.payloads.layout import Layout

DONE, GAVE_UP = 1, 2
"""How what all ranks do together has ended: see `Word.done`."""


class Word(NamedTuple):
    """What the ranks agree on at a step boundary. The first three are sums over all ranks; the rest is what
    the first rank says."""

    tokens: int = 0
    """Tokens of this step, on all ranks together."""
    stop: int = 0
    """How many ranks have been told to stop."""
    leaving: int = 0
    """How many ranks have left their loops."""
    done: int = 0
    """Whether what all do together (beginning, settling) is over: `DONE` or `GAVE_UP`, else 0."""
    own_last: int = 0
    clock: int = 0
    swarm_tokens: int = 0
    links: int = 0
    version: int = 0
    taken: int = 0
    steps: int = 0
    own_tokens: int = 0
    loss: float = 0.0
    touched: frozenset[int] = frozenset()
    """Fragments that change now."""


class Team(Protocol):
    """The processes that train one model."""

    rank: int
    size: int

    def bind(self, layout: Layout) -> Mapping[str, Tensor]:
        """Learn which fragments there are; returns the whole parameters, for the first rank's outer loop."""
        ...

    def share(self, data: bytes) -> bytes:
        """Return the first rank's bytes on all ranks."""
        ...

    def agree(self, word: Word) -> Word:
        """Exchange words."""
        ...

    def full(self, fragments: frozenset[int]) -> AbstractContextManager[object]:
        """Inside, the first rank has these fragments whole and may change them; afterwards all ranks have the
        changes."""
        ...

    def close(self) -> None:
        """Nothing more will be exchanged."""
        ...


class Alone:
    """A team of one, which has nothing to agree on."""

    rank = 0
    size = 1

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def bind(self, layout: Layout) -> Mapping[str, Tensor]:
        return self._tensors

    def share(self, data: bytes) -> bytes:
        return data

    def agree(self, word: Word) -> Word:
        return word

    def full(self, fragments: frozenset[int]) -> AbstractContextManager[object]:
        return nullcontext()

    def close(self) -> None:
        pass
