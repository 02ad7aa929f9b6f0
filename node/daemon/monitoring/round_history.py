"""The chronicle on disk: one SQLite file, written in batches. If it is lost, only history for display is
lost.

It reaches further back than the rounds in memory: old rounds are seldom looked at, and can wait for the disk.
"""

import logging
import math
import sqlite3
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

from gossamer.node.ipc.messages import Report
from gossamer.protocol.claims import total
from gossamer.protocol.errors import MalformedError, StorageError
from gossamer.protocol.limits import MEMBERS_MAX
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.merge.contributions import Figures
from gossamer.protocol.merge.tokens import TokenCount
from gossamer.protocol.payloads.layout import Layout
from gossamer.protocol.records import Delta
from gossamer.protocol.wire import pack, unpack

# --- How many tokens all deltas merged up to each round count for.


class _Stretch:
    """The rounds of one of `TokenCount`'s stretches, and the tokens that deltas up to its bounds count
    for."""

    def __init__(self, rounds: tuple[int, ...], below: int) -> None:
        self.rounds = rounds
        self.below = self.up_to_its_end = below
        self.counted = 0
        """Tokens that the stretch's own deltas count for."""


class MergedTokens:
    """Keeps these counts up to date as rounds are merged, and merged again."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._merged: dict[int, tuple[Delta, ...]] = {}
        """The deltas that Phi holds of the rounds above its base."""
        self._stretches: dict[int, _Stretch] = {}
        """The stretches of these rounds, ascending, as they were last settled."""
        self._base = (0, 0)
        """The base as it was then: its last round, and its tokens."""
        self._unsettled: set[int] = set()

    def merged(self, round_: int, deltas: tuple[Delta, ...]) -> None:
        """Note that Phi holds these deltas of a round."""
        self._merged[round_] = deltas
        self._unsettled.add(round_)

    def settle(self, base_round: int, base_tokens: int, known: Callable[[int], int | None]) -> dict[int, int]:
        """Count what has changed since the last call; returns the counts of the rounds concerned.

        `known` tells a round's last count, None if it has none. The base is the part of Phi that can no
        longer change.
        """
        changes: dict[int, int] = {}
        if not self._unsettled:
            return changes
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
            self._settle_stretch(stretch, kept.get(number), known, changes)
            below = stretch.up_to_its_end
        self._unsettled.clear()
        return changes

    def _settle_stretch(
        self,
        stretch: _Stretch,
        before: _Stretch | None,
        known: Callable[[int], int | None],
        changes: dict[int, int],
    ) -> None:
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
            if round_ >= first:
                count.change((), self._merged[round_])
                changes[round_] = total((stretch.below, count.total))
            elif (tokens := known(round_)) is not None:
                changes[round_] = total((tokens - before.below, stretch.below))
        stretch.counted = count.total if has_changed else before.counted
        stretch.up_to_its_end = total((stretch.below, stretch.counted))


# --- Held-out losses that this node's trainer has measured, for pages that are opened later.

EVALUATIONS_MAX = 2_000
"""How many are kept: 10,000 rounds with an evaluation every fifth round."""


class Evaluations:
    """The last held-out loss of each round; the oldest are dropped first."""

    def __init__(self) -> None:
        self._losses: dict[int, float] = {}
        self._unsaved: dict[int, float] = {}
        self._version = -1
        """The version of Phi that the latest loss was measured on; reports repeat it."""

    def restore(self, losses: Iterable[tuple[int, float]]) -> None:
        """Take over the losses that an earlier run kept, in order of round."""
        self._losses.update(losses)

    def look(self, report: Report | None) -> None:
        """Note a trainer's held-out loss, if it is new and a finite number.

        A trainer repeats to a restarted daemon what it told the one before.
        """
        if report is None or report.val_loss is None or report.evaluated_version == self._version:
            return
        self._version, round_ = report.evaluated_version, report.evaluated_round
        if not math.isfinite(report.val_loss) or self._losses.get(round_) == report.val_loss:
            return
        self._losses.pop(round_, None)
        self._losses[round_] = self._unsaved[round_] = report.val_loss
        if len(self._losses) > EVALUATIONS_MAX:
            del self._losses[next(iter(self._losses))]

    def take_unsaved(self) -> dict[int, float]:
        """The losses that are to be saved."""
        taken, self._unsaved = self._unsaved, {}
        return taken

    def not_saved(self, losses: dict[int, float]) -> None:
        """Note that losses taken by `take_unsaved` could not be saved. Those that came meanwhile are
        newer."""
        self._unsaved = {**losses, **self._unsaved}

    def to_json(self) -> dict[str, Any]:
        """For the page: the round and loss of each, and the version of Phi of the last one."""
        return {"version": self._version, "losses": [list(item) for item in self._losses.items()]}


# --- One round as the chronicle keeps it, and as it is told to the page.

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


# --- What happened, round by round, for people who watch; also of rounds that are closed.
#
# The ledger forgets closed rounds. The chronicle keeps a line for each delta of the latest rounds, and
# `chroniclestore` of more. It is fed from the records as they come and from the merges. Nothing in the
# protocol
# depends on it.

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


ENTRIES_BYTES_MAX = 1 << 20
"""Limit for one round: 1,024 entries of under 100 bytes."""

STORED_BYTES_MAX = 1 << 26
"""Limit for all rounds together: 10,000 rounds with 64 members each take 35 MB."""

DROP_EVERY = 100
"""Excess rounds are dropped once in this many rounds written, since finding them reads the whole file."""

LOCKED_S = 5.0
"""How long to wait for a file that another process has locked."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS rounds (
    round INTEGER PRIMARY KEY, seen REAL NOT NULL,
    swarm_tokens INTEGER,  -- `Round.merged_tokens`
    agreement REAL,
    entries BLOB NOT NULL  -- msgpack: [[author, tokens, steps, staleness, loss, flags], ...]
);
CREATE TABLE IF NOT EXISTS evaluations (round INTEGER PRIMARY KEY, loss REAL NOT NULL);
"""

_COLUMNS = "round, seen, swarm_tokens, agreement, entries"
_DROP_OLDEST = """
DELETE FROM rounds WHERE round <= (
    SELECT max(round) FROM (
        SELECT round, count(*) OVER newest AS rounds, sum(length(entries)) OVER newest AS bytes
        FROM rounds WINDOW newest AS (ORDER BY round DESC)
    ) WHERE rounds > ? OR bytes > ?
);
"""

_DROP_EVALUATIONS = """
DELETE FROM evaluations WHERE round NOT IN (SELECT round FROM evaluations ORDER BY round DESC LIMIT ?);
"""

log = logging.getLogger("gossamer.chronicle")


_NONE: Mapping[int, float] = MappingProxyType({})


class ChronicleStore:
    """The chronicle's file. It blocks: call it from worker threads."""

    def __init__(self, path: Path) -> None:
        """Opens nothing yet."""
        self._path = path
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        self._undropped = DROP_EVERY
        """Rounds written since excess ones were last dropped; an earlier run may have left too many."""

    def load(self) -> tuple[list[Round], int]:
        """The newest rounds, as many as are kept in memory, ascending; and the newest one left out, or 0.

        A damaged file is replaced by a new one.
        """
        with self._lock:
            try:
                return self._load()
            except (sqlite3.Error, MalformedError, TypeError, ValueError) as error:
                log.warning("earlier rounds are not known: cannot read %s (%s)", self._path, error)
                if _is_damage(error):
                    self._begin_anew()
                return [], 0

    def _load(self) -> tuple[list[Round], int]:
        found: list[Round] = []
        entries = 0
        for values in self._open().execute(f"SELECT {_COLUMNS} FROM rounds ORDER BY round DESC"):
            row = _round_of(values)
            entries += len(row.entries)
            if len(found) == ROUNDS_MAX or (entries > ENTRIES_MAX and found):
                return found[::-1], row.number
            found.append(row)
        return found[::-1], 0

    def load_evaluations(self) -> list[tuple[int, float]]:
        """Held-out losses by round, ascending; none if they cannot be read."""
        query = "SELECT round, loss FROM evaluations WHERE typeof(loss) = 'real' ORDER BY round"
        with self._lock:
            try:
                return self._open().execute(query).fetchall()
            except sqlite3.Error as error:
                log.debug("cannot read %s: %s", self._path, error)
                return []

    def between(self, first: int, last: int, rounds_max: int, entries_max: int) -> list[Round]:
        """The newest rounds kept from `first` to `last`, descending, within the limits of `at_most`; none if
        they cannot be read."""
        query = f"SELECT {_COLUMNS} FROM rounds WHERE round BETWEEN ? AND ? ORDER BY round DESC"
        with self._lock:
            try:
                found = self._open().execute(query, (first, last))
                return list(at_most(map(_round_of, found), rounds_max, entries_max))
            except (sqlite3.Error, MalformedError, TypeError, ValueError) as error:
                log.debug("cannot read %s: %s", self._path, error)
                return []

    def oldest(self) -> int | None:
        """The oldest round kept; None if there is none, or it cannot be read."""
        with self._lock:
            try:
                (found,) = self._open().execute("SELECT min(round) FROM rounds").fetchone()
            except sqlite3.Error:
                return None
        return None if found is None else int(found)

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            db = sqlite3.connect(self._path, check_same_thread=False, isolation_level=None, timeout=LOCKED_S)
            try:
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=NORMAL")
                db.executescript(_SCHEMA)
            except BaseException:  # a full disk, say: the next call tries to open it again
                db.close()
                raise
            self._db = db
        return self._db

    def _begin_anew(self) -> None:
        self._close()
        for suffix in ("", "-wal", "-shm"):
            with suppress(OSError):
                self._path.with_name(self._path.name + suffix).unlink()

    def save(self, rounds: Iterable[Round], evaluations: Mapping[int, float] = _NONE) -> None:
        """Write rounds and held-out losses, and now and then drop the oldest beyond what is kept.

        Raises StorageError.
        """
        rows = [
            (row.number, row.seen, _bounded(row.merged_tokens), row.agreement, _pack(row)) for row in rounds
        ]
        with self._lock:
            undropped = self._undropped + len(rows)
            try:
                db = self._open()
                db.execute("BEGIN IMMEDIATE")
                try:
                    db.executemany("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?, ?, ?)", rows)
                    if undropped >= DROP_EVERY:
                        db.execute(_DROP_OLDEST, (ROUNDS_MAX, STORED_BYTES_MAX))
                        undropped = 0
                    db.executemany("INSERT OR REPLACE INTO evaluations VALUES (?, ?)", evaluations.items())
                    db.execute(_DROP_EVALUATIONS, (EVALUATIONS_MAX,))
                    db.execute("COMMIT")
                    self._undropped = undropped
                except BaseException:
                    if db.in_transaction:  # a full disk has rolled back already
                        db.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                raise StorageError(f"cannot write {self._path}: {error}") from None

    def close(self) -> None:
        """Close the database."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self._db is not None:
            with suppress(sqlite3.Error):
                self._db.close()
            self._db = None


def _is_damage(error: Exception) -> bool:
    """Whether the file itself is at fault, and not a full disk or missing permissions."""
    is_operational = isinstance(error, sqlite3.OperationalError)
    return not is_operational or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR


def _round_of(values: tuple[int, float, int | None, float | None, bytes]) -> Round:
    """A round from its row in the file. Raises MalformedError, TypeError or ValueError."""
    number, seen, merged_tokens, agreement, packed = values
    return Round(number, seen, merged_tokens, agreement, _unpack(packed))


def _pack(row: Round) -> bytes:
    return pack([list(entry) for entry in row.entries])


def _unpack(packed: bytes) -> tuple[Entry, ...]:
    value = unpack(packed, ENTRIES_BYTES_MAX)
    if not isinstance(value, list):
        raise ValueError("entries that are no list")
    return tuple(Entry(*fields) for fields in value)


def _bounded(tokens: int | None) -> int | None:
    """A token count that fits SQLite's 64-bit integers; what members claim may add up to more."""
    return None if tokens is None else min(tokens, 2**63 - 1)
