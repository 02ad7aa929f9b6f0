"""What happened, round by round, for people who watch; also of rounds that are closed.

The ledger forgets closed rounds. The chronicle keeps a line for each delta of the latest rounds, and
`chroniclestore` of more. It is fed from the records as they come and from the merges. Nothing in the protocol
depends on it.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby, islice
from operator import attrgetter
from statistics import median
from typing import Any, NamedTuple

from gossamer.protocol.claims import total
from gossamer.protocol.limits import MEMBERS_MAX
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.merging.conduct import Figures
from gossamer.protocol.merging.token_count import TokenCount
from gossamer.protocol.payloads.layout import Layout
from gossamer.protocol.records import Delta

ROUNDS_MAX = 10_000
ENTRIES_MAX = 100_000
"""Deltas of all rounds together, about 30 MB of memory: 10,000 rounds of 10 members, or 1,500 of 64."""

AHEAD_MAX = 64
"""How many rounds past the swarm's clock are noted. Since older rounds make room for newer ones, a liar who
signs rounds of the far future could otherwise clear the past away."""

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


class _Stretch:
    """The rounds of one of `TokenCount`'s stretches, and the tokens that deltas up to its bounds count
    for."""

    def __init__(self, rounds: tuple[int, ...], below: int) -> None:
        self.rounds = rounds
        self.below = self.up_to_its_end = below
        self.counted = 0
        """Tokens that the stretch's own deltas count for."""


class Chronicle:
    """The latest rounds; the oldest are dropped first. Rounds are immutable, so other threads may read
    them."""

    def __init__(self, own_id: bytes, manifest: Manifest) -> None:
        self._own_id = own_id
        self._manifest = manifest
        self._rounds: dict[int, Round] = {}
        self._order: list[int] = []
        """The numbers of these rounds, ascending: a joiner may hear of many times as many, one after another,
        and each time the oldest makes room."""
        self._entries = 0
        self._highest_merged = 0
        self._merged: dict[int, tuple[Delta, ...]] = {}
        """The deltas that Phi holds of the rounds above its base."""
        self._stretches: dict[int, _Stretch] = {}
        """The stretches of the rounds in `_merged`, ascending, as they were last settled."""
        self._base = (0, 0)
        """The base as it was then: its last round, and its tokens."""
        self._unsettled: set[int] = set()
        self._changed: set[int] = set()
        self._unsaved: set[int] = set()
        self.begins_after = 0
        """Rounds up to this one have been dropped here; the store may have them."""

    # -- what happens

    def restore(self, rounds: Iterable[Round], begins_after: int = 0) -> None:
        """Take over the rounds that an earlier run kept. Those up to `begins_after` are only in the store."""
        self.begins_after = begins_after
        for row in rounds:
            self._rounds[row.number] = row
            self._entries += len(row.entries)
        self._order = sorted(self._rounds)
        self._bound()

    def heard(
        self, delta: Delta, *, unix_s: float, clock: int, live: bool = False, void: bool = False
    ) -> None:
        """Note a delta's record. `live`: it has come just now, while we were not catching up."""
        if delta.round > clock + AHEAD_MAX or delta.round <= self.begins_after:
            return
        row = self._rounds.get(delta.round) or Round(delta.round, unix_s, None, None, ())
        place = bisect_left(row.entries, delta.author, key=attrgetter("author"))
        is_known = place < len(row.entries) and row.entries[place].author == delta.author
        if not is_known:
            if len(row.entries) >= MEMBERS_MAX:
                return
            flags = (LATE if live and delta.round < self._highest_merged else 0) | (VOID if void else 0)
            added = self._entry(delta, flags)
            self._put(row._replace(entries=(*row.entries[:place], added, *row.entries[place:])))
        elif void:
            self._put(_flagged(row, {delta.author: VOID}))

    def merged(
        self,
        round_: int,
        deltas: Iterable[Delta],
        *,
        void: Iterable[bytes] = (),
        figures: Mapping[bytes, Figures] | None = None,
        agreement: float | None = None,
        unix_s: float,
        clock: int,
    ) -> None:
        """Note that a round was merged, or merged again: `deltas` are all that Phi holds of it.

        `void` are authors whose records do not count. `figures` is None if nothing was computed.
        """
        self._highest_merged = max(self._highest_merged, min(round_, clock + 1))
        self._merged[round_] = tuple(deltas)
        row = self._rounds.get(round_)
        known = {entry.author for entry in row.entries} if row is not None else set()
        for delta in self._merged[round_]:
            if delta.author not in known:
                self.heard(delta, unix_s=unix_s, clock=clock)
        self._unsettled.add(round_)
        row = self._rounds.get(round_)
        if row is None:
            return
        found = dict.fromkeys(void, VOID)
        for author, of_member in (figures or {}).items():
            found[author] = found.get(author, 0) | _flags_of(of_member)
        if figures is not None:
            row = row._replace(agreement=agreement)
            row = _flagged(row, {entry.author: 0 for entry in row.entries}, clear=CLIPPED)
        self._put(_flagged(row, found))

    def settle(self, base_round: int, base_tokens: int) -> None:
        """Bring `Round.merged_tokens` up to date. The base is the part of Phi that can no longer change."""
        if not self._unsettled:
            return
        stretch_of = TokenCount(self._manifest).stretch_of
        first = stretch_of(min(self._unsettled))
        if (base_round, base_tokens) != self._base:
            self._merged = {r: deltas for r, deltas in self._merged.items() if r > base_round}
            self._base, first = (base_round, base_tokens), 0
        kept = {}
        while self._stretches and next(reversed(self._stretches)) >= first:
            number, stretch = self._stretches.popitem()
            kept[number] = stretch
        # Stretches before the first change keep their counts: if everything is retained, that is nearly all.
        below = next(reversed(self._stretches.values())).up_to_its_end if self._stretches else base_tokens
        begin = max(base_round, self._manifest.history.snapshot_every * first)
        for number, rounds in groupby(sorted(r for r in self._merged if r > begin), stretch_of):
            stretch = self._stretches[number] = _Stretch(tuple(rounds), below)
            self._settle_stretch(stretch, kept.get(number))
            below = stretch.up_to_its_end
        self._unsettled.clear()

    def _settle_stretch(self, stretch: "_Stretch", before: "_Stretch | None") -> None:
        """Count the tokens of a stretch's rounds, whose deltas are capped together. `before` is the stretch
        as last settled.

        Rounds before the first that changed keep their counts, since there may be very many.
        """
        first: float = min((r for r in stretch.rounds if r in self._unsettled), default=math.inf)
        if before is None or stretch.rounds[: len(before.rounds)] != before.rounds:
            before, first = stretch, 0
        has_changed = first <= stretch.rounds[-1]
        if not has_changed and stretch.below == before.below:
            stretch.counted, stretch.up_to_its_end = before.counted, before.up_to_its_end
            return
        earlier = (d for r in stretch.rounds if has_changed and r < first for d in self._merged[r])
        count = TokenCount(self._manifest, earlier)
        for round_ in stretch.rounds:
            row = self._rounds.get(round_)
            tokens = None if row is None else row.merged_tokens
            if round_ >= first:
                count.change((), self._merged[round_])
                tokens = total((stretch.below, count.total))
            elif tokens is not None:
                tokens = total((tokens - before.below, stretch.below))
            if row is not None and tokens != row.merged_tokens:
                self._put(row._replace(merged_tokens=tokens))
        stretch.counted = count.total if has_changed else before.counted
        stretch.up_to_its_end = total((stretch.below, stretch.counted))

    # -- questions

    def newest_first(self, first: int, last: int) -> Iterator[Round]:
        """The rounds kept from `first` to `last`, descending."""
        kept = self._order[bisect_left(self._order, first) : bisect_right(self._order, last)]
        return (self._rounds[number] for number in reversed(kept))

    def oldest(self) -> int | None:
        """The oldest round kept here; None if there is none."""
        return self._order[0] if self._order else None

    def at(self, round_: int) -> Round | None:
        return self._rounds.get(round_)

    def take_changed(self) -> list[Round]:
        """The rounds that are new or have changed since the last call, ascending."""
        taken = [self._rounds[number] for number in sorted(self._changed) if number in self._rounds]
        self._changed.clear()
        return taken

    def take_unsaved(self) -> list[Round]:
        """The rounds that have changed since the last call. A caller that cannot save them calls
        `not_saved`."""
        taken = [self._rounds[number] for number in sorted(self._unsaved) if number in self._rounds]
        self._unsaved.clear()
        return taken

    def not_saved(self, rounds: Iterable[Round]) -> None:
        """Note that these rounds could not be saved: they are tried again with the next."""
        self._unsaved.update(row.number for row in rounds)

    # -- inside

    def _entry(self, delta: Delta, flags: int) -> Entry:
        own = OWN if delta.author == self._own_id else 0
        body = delta.body
        staleness = delta.staleness(self._manifest.layout.fragments)
        return Entry(delta.author, body.tokens, body.steps, staleness, body.loss, flags | own)

    def _put(self, row: Round) -> None:
        old = self._rounds.get(row.number)
        if old == row:
            return
        if old is None:
            insort(self._order, row.number)
        self._rounds[row.number] = row
        self._entries += len(row.entries) - (len(old.entries) if old else 0)
        self._changed.add(row.number)
        self._unsaved.add(row.number)
        self._bound()

    def _bound(self) -> None:
        """Drop the oldest rounds beyond the limits."""
        while len(self._rounds) > ROUNDS_MAX or (self._entries > ENTRIES_MAX and len(self._rounds) > 1):
            oldest = self._order.pop(0)
            self._entries -= len(self._rounds.pop(oldest).entries)
            self.begins_after = max(self.begins_after, oldest)


def at_most(rounds: Iterable[Round], rounds_max: int, entries_max: int) -> Iterator[Round]:
    """The first rounds, at most `rounds_max`, up to the one with which they reach `entries_max` entries."""
    entries = 0
    for row in islice(rounds, rounds_max):
        yield row
        entries += len(row.entries)
        if entries >= entries_max:
            return


def _flagged(row: Round, found: Mapping[bytes, int], clear: int = 0) -> Round:
    """A round with flags set for some authors; the flags in `clear` are cleared for these first."""
    entries = tuple(
        entry._replace(flags=entry.flags & ~clear | found[entry.author]) if entry.author in found else entry
        for entry in row.entries
    )
    return row._replace(entries=entries)


def _flags_of(figures: Figures) -> int:
    return (VOID if figures.void else 0) | (CLIPPED if figures.is_clipped else 0)


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
