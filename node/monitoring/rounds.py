"""One round as the chronicle keeps it, and as it is told to the page."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

from gossamer.protocol.payloads.layout import Layout

LATE, VOID, CLIPPED, OWN = 1, 2, 4, 8
"""Flags of an entry. *Late*: a later round had been merged here already when the delta came."""


class Entry(NamedTuple):
    """One author's delta in a round."""

    author: bytes
    tokens: int
    steps: int
    staleness: int
    loss: float
    flags: int


class Round(NamedTuple):
    """What is known of one round now."""

    number: int
    seen: float
    """When its first delta came here, Unix seconds."""
    merged_tokens: int | None
    """How many tokens all deltas merged up to and including this round count for (see `token_count` and
    `Layout.trained_tokens`); None before the round was merged."""
    agreement: float | None
    """Mean cosine of pairs of its deltas."""
    entries: tuple[Entry, ...]
    """In order of author."""

    @property
    def counted(self) -> list[Entry]:
        """The entries that are not void."""
        return [entry for entry in self.entries if not entry.flags & VOID]

    @property
    def tokens(self) -> int:
        """Tokens as the authors state them."""
        return sum(entry.tokens for entry in self.counted)

    @property
    def loss(self) -> float | None:
        """The median of the losses, with one vote each: one liar could set a mean. None if nothing counts."""
        losses = [entry.loss for entry in self.counted]
        return median(losses) if losses else None


def flagged(row: Round, found: Mapping[bytes, int], clear: int = 0) -> Round:
    """A round with flags set for some authors; the flags in `clear` are cleared for these first."""
    entries = tuple(
        entry._replace(flags=entry.flags & ~clear | found[entry.author]) if entry.author in found else entry
        for entry in row.entries
    )
    return row._replace(entries=entries)


def at_most(rounds: Iterable[Round], rounds_max: int, entries_max: int) -> Iterator[Round]:
    """The first rounds, at most `rounds_max`, up to the one with which they reach `entries_max` entries."""
    entries = 0
    for row in islice(rounds, rounds_max):
        yield row
        entries += len(row.entries)
        if entries >= entries_max:
            return


def as_json(rounds: Iterable[Round], layout: Layout) -> dict[str, Any]:
    """``{"authors": [hex], "rounds": [[round, seen, loss, tokens, swarm tokens, agreement, entries], ...]}``

    Tokens are those of the round's windows. Swarm tokens are what the swarm has trained on up to the round.
    Entries are ``[author's index, tokens, steps, staleness, loss, flags]``.
    """
    places: dict[bytes, int] = {}
    lines = [line_of(row, layout, places) for row in rounds]
    return {"authors": [author.hex() for author in places], "rounds": lines}


def line_of(row: Round, layout: Layout, places: dict[bytes, int]) -> list[Any]:
    """One round of `as_json`. `places` maps each author to an index; new authors are added."""
    loss, agreement = row.loss, row.agreement
    return [
        row.number,
        round(row.seen, 1),
        None if loss is None else round(loss, 5),
        row.tokens,
        None if row.merged_tokens is None else layout.trained_tokens(row.merged_tokens),
        None if agreement is None else round(agreement, 4),
        [
            [
                places.setdefault(entry.author, len(places)),
                entry.tokens,
                entry.steps,
                entry.staleness,
                round(entry.loss, 5),
                entry.flags,
            ]
            for entry in row.entries
        ],
    ]
