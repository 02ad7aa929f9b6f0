"""What happened, round by round, for people who watch; also of rounds that are closed.

The ledger forgets closed rounds. The chronicle keeps a line for each delta of the latest rounds, and
`chroniclestore` of more. It is fed from the records as they come and from the merges. Nothing in the protocol
depends on it.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter

from gossamer.node.monitoring.mergedtokens import MergedTokens
from gossamer.node.monitoring.rounds import CLIPPED, LATE, OWN, VOID, Entry, Round, flagged
from gossamer.protocol.limits import MEMBERS_MAX
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.merging.conduct import Figures
from gossamer.protocol.records import Delta

ROUNDS_MAX = 10_000
ENTRIES_MAX = 100_000
"""Deltas of all rounds together, about 30 MB of memory: 10,000 rounds of 10 members, or 1,500 of 64."""

AHEAD_MAX = 64
"""How many rounds past the swarm's clock are noted. Since older rounds make room for newer ones, a liar who
signs rounds of the far future could otherwise clear the past away."""


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
        self._merged_tokens = MergedTokens(manifest)
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
            self._put(flagged(row, {delta.author: VOID}))

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
        held = tuple(deltas)
        row = self._rounds.get(round_)
        known = {entry.author for entry in row.entries} if row is not None else set()
        for delta in held:
            if delta.author not in known:
                self.heard(delta, unix_s=unix_s, clock=clock)
        self._merged_tokens.merged(round_, held)
        row = self._rounds.get(round_)
        if row is None:
            return
        found = dict.fromkeys(void, VOID)
        for author, of_member in (figures or {}).items():
            found[author] = found.get(author, 0) | _flags_of(of_member)
        if figures is not None:
            row = row._replace(agreement=agreement)
            row = flagged(row, {entry.author: 0 for entry in row.entries}, clear=CLIPPED)
        self._put(flagged(row, found))

    def settle(self, base_round: int, base_tokens: int) -> None:
        """Bring `Round.merged_tokens` up to date. The base is the part of Phi that can no longer change."""
        counted = self._merged_tokens.settle(base_round, base_tokens, self._tokens_at)
        for round_, tokens in counted.items():
            row = self._rounds.get(round_)
            if row is not None and row.merged_tokens != tokens:
                self._put(row._replace(merged_tokens=tokens))

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

    def _tokens_at(self, round_: int) -> int | None:
        row = self._rounds.get(round_)
        return None if row is None else row.merged_tokens

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


def _flags_of(figures: Figures) -> int:
    return (VOID if figures.void else 0) | (CLIPPED if figures.is_clipped else 0)
