"""What happened, round by round, for people who watch; also of rounds that are closed.

The ledger forgets closed rounds. The history keeps a line for each delta of the latest rounds: a ring in
memory, and a file of JSON lines that is appended to, so that it outlives the process. It is fed from the
records as they come and from the merges. Nothing in the protocol depends on it; the history of record is
Prometheus's.
"""

import json
import logging
import time
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from gossamer.node.files import cannot_write, write_atomically
from gossamer.node.ipc.messages import Report
from gossamer.protocol.limits import MEMBERS_MAX, ROUND_MAX
from gossamer.protocol.merge.contributions import RoundFigures
from gossamer.protocol.merge.merge import TokenCount
from gossamer.protocol.payloads import Layout
from gossamer.protocol.records import Delta
from gossamer.protocol.replica import Replica

ENTRIES_MAX = 100_000
"""Deltas of all rounds together, about 30 MB of memory: 10,000 rounds of 10 members, or 1,500 of 64."""

ANSWER_ENTRIES_MAX = 32_768
"""Deltas in one answer, about 1 MB of JSON. A page asks again for older rounds."""

AHEAD_MAX = 64
"""How many rounds past the swarm's clock are noted. Since older rounds make room for newer ones, a liar who
signs rounds of the far future could otherwise clear the past away."""

FILE_BYTES_MAX = 1 << 26
"""The file is written anew once it is larger; the history itself takes about 10 MB."""

LATE, VOID, CLIPPED, OWN = 1, 2, 4, 8
"""Flags of an entry. *Late*: a later round had been merged here already when the delta came."""

log = logging.getLogger("gossamer.history")


class Entry(NamedTuple):
    """One author's delta in a round."""

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
    """How many tokens its merged deltas count for, see `TokenCount`; None before the round was merged."""
    agreement: float | None
    """Mean cosine of pairs of its deltas."""
    entries: Mapping[bytes, Entry]
    """By author."""
    val_loss: float | None = None
    """The live model's held-out loss after the round, if this node has measured it."""
    val_loss_average: float | None = None
    """The averaged model's."""

    @property
    def counted(self) -> list[Entry]:
        """The entries that are not void."""
        return [entry for entry in self.entries.values() if not entry.flags & VOID]

    def flagged(self, flags: Mapping[bytes, int], clear: int = 0) -> "Round":
        """This round with flags set for some authors, and first the flags in `clear` cleared for all."""
        found = {a: e._replace(flags=e.flags & ~clear | flags.get(a, 0)) for a, e in self.entries.items()}
        return self._replace(entries=found)

    def saved(self) -> list[Any]:
        """As a line of the file has it; `of` reads it."""
        entries = [[author.hex(), *entry] for author, entry in self.entries.items()]
        return list(self._replace(entries=entries))  # type: ignore[arg-type]

    @classmethod
    def of(cls, saved: Iterable[Any]) -> "Round":
        """From a line of the file. Raises TypeError or ValueError."""
        number, seen, merged_tokens, agreement, entries, *losses = saved
        read = {bytes.fromhex(author): Entry(*rest) for author, *rest in entries}
        return cls(int(number), float(seen), merged_tokens, agreement, read, *losses)


def dump(data: Any) -> bytes:
    """Compact JSON, ASCII, in one line. Raises ValueError for what JSON cannot express, such as infinity."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode()


def dump_rounds(rounds: Iterable[Round], oldest: int | None, layout: Layout) -> bytes:
    """JSON: the oldest round kept of all, the authors' ids in hex, and rounds as ``[round, seen, loss,
    tokens, merged tokens, agreement, [[author's index, tokens, steps, staleness, loss, flags], ...]]``.

    Tokens are those of the round's windows; merged tokens are what the swarm has trained on with the round.
    Each round is serialised by itself: a single call for all would hold the interpreter lock, which the event
    loop needs too.
    """
    places: dict[bytes, int] = {}
    lines = []
    for row in rounds:
        if not row.entries:  # before the first round, where only the loss was measured
            continue
        counted, agreement, merged = row.counted, row.agreement, row.merged_tokens
        facts = (
            row.number,
            round(row.seen, 1),
            # The median, with one vote each: one liar could set a mean.
            round(median(entry.loss for entry in counted), 5) if counted else None,
            sum(entry.tokens for entry in counted),
            None if merged is None else layout.trained_tokens(merged),
            None if agreement is None else round(agreement, 4),
            [(places.setdefault(author, len(places)), *entry) for author, entry in row.entries.items()],
        )
        lines.append(dump(facts))
    authors = dump([author.hex() for author in places])
    return b'{"oldest":%b,"authors":%b,"rounds":[%b]}' % (dump(oldest), authors, b",".join(lines))


class RoundHistory:
    """The latest rounds; the oldest are dropped first. Rounds are immutable, so other threads may read
    them."""

    def __init__(self, core: Replica) -> None:
        self._core = core
        self._rounds: dict[int, Round] = {}
        self._order: list[int] = []
        """The numbers of these rounds, ascending: a joiner may hear of many times as many, one after another,
        and each time the oldest makes room."""
        self._entries = 0
        self._begins_after = 0
        """Rounds up to this one have been dropped."""
        self._highest_merged = 0
        self._changed: set[int] = set()
        self._unsaved: set[int] = set()
        self._evaluated_version = -1
        """The version of Phi that the latest held-out losses were measured on; reports repeat it."""

    # -- what happens

    def heard(self, delta: Delta, *, live: bool = False) -> None:
        """Note a delta's record. `live`: it has come just now, while we were not catching up."""
        core, number, author = self._core, delta.round, delta.author
        # While no members are known, only records tell where the clock is.
        if number > (core.clock or number) + AHEAD_MAX or number <= self._begins_after:
            return
        row = self._rounds.get(number) or Round(number, time.time(), None, None, {})
        void = VOID if core.ledger.is_void(delta) else 0
        if author in row.entries:
            self._put(row.flagged({author: void}))
        elif len(row.entries) < MEMBERS_MAX:
            own = OWN if author == core.identity.node_id else 0
            late = LATE if live and number < self._highest_merged else 0
            body, staleness = delta.body, delta.staleness(core.manifest.layout.fragments)
            entry = Entry(body.tokens, body.steps, staleness, round(body.loss, 5), own | late | void)
            self._put(row._replace(entries={**row.entries, author: entry}))

    def merged(self, number: int, deltas: Sequence[Delta], found: RoundFigures | None = None) -> None:
        """Note that a round was merged, or merged again: `deltas` are all that Phi holds of it. `found` is
        None if nothing was computed."""
        core = self._core
        if number <= core.ledger.floor:
            return  # closed meanwhile: the ledger no longer knows whose deltas were valid
        self._highest_merged = max(self._highest_merged, min(number, (core.clock or number) + 1))
        row = self._rounds.get(number)
        for delta in deltas:
            if row is None or delta.author not in row.entries:
                self.heard(delta)
        row = self._rounds.get(number)
        if row is None:
            return
        row = row._replace(merged_tokens=TokenCount(core.manifest, deltas).total)
        valid = {delta.author for delta in core.ledger.valid(number)}
        flags = dict.fromkeys(row.entries.keys() - valid, VOID)
        if found is not None:
            row = row.flagged({}, clear=CLIPPED)._replace(agreement=found.agreement)
            for author, figures in found.members.items():
                is_void = VOID if figures.void else 0
                flags[author] = flags.get(author, 0) | is_void | (CLIPPED if figures.is_clipped else 0)
        self._put(row.flagged(flags))

    def evaluated(self, report: Report | None) -> None:
        """Note a trainer's held-out losses, if they are new and the live model's is a finite number.

        A trainer repeats to a restarted daemon what it told the one before.
        """
        if report is None or report.val_loss is None or report.evaluated_version == self._evaluated_version:
            return
        self._evaluated_version, number = report.evaluated_version, report.evaluated_round
        if isfinite(report.val_loss) and number >= self._begins_after:
            row = self._rounds.get(number) or Round(number, time.time(), None, None, {})
            self._put(row._replace(val_loss=report.val_loss, val_loss_average=report.val_loss_average))

    # -- questions

    def newest(self, first: int = 0, last: int = ROUND_MAX) -> list[Round]:
        """The newest rounds kept from `first` to `last`, as many as one answer holds, ascending."""
        begin, end = bisect_left(self._order, first), bisect_right(self._order, last)
        entries, start = 0, end
        while start > begin and entries < ANSWER_ENTRIES_MAX:
            start -= 1
            entries += len(self._rounds[self._order[start]].entries)
        return [self._rounds[number] for number in self._order[start:end]]

    def oldest(self) -> int | None:
        """The oldest round kept that anybody trained in; None if there is none."""
        return next((number for number in self._order if self._rounds[number].entries), None)

    def losses_as_json(self) -> dict[str, Any]:
        """Held-out losses for the page: ``[round, live, averaged]`` of each evaluation, and the version of
        Phi of the last one."""
        rows = (self._rounds[number] for number in self._order)
        losses = [[r.number, r.val_loss, r.val_loss_average] for r in rows if r.val_loss is not None]
        return {"version": self._evaluated_version, "losses": losses}

    def take_changed(self) -> list[Round]:
        """The rounds that are new or have changed since the last call, ascending."""
        taken, self._changed = self._changed, set()
        return [self._rounds[number] for number in sorted(taken & self._rounds.keys())]

    # -- the file

    def restore(self, rounds: Iterable[Round]) -> None:
        """Take over what an earlier run kept."""
        for row in sorted(rounds):
            self._put(row)
        self._changed.clear()

    def take_unsaved(self, *, everything: bool) -> list[Round]:
        """The rounds that have changed since the last call, or all that are kept, ascending."""
        taken, self._unsaved = self._unsaved & self._rounds.keys(), set()
        return [self._rounds[number] for number in (self._order if everything else sorted(taken))]

    # -- inside

    def _put(self, row: Round) -> None:
        """Keep a round, and drop the oldest beyond the limits."""
        old = self._rounds.get(row.number)
        if old == row:
            return
        if old is None:
            insort(self._order, row.number)
        self._rounds[row.number] = row
        self._entries += len(row.entries) - (len(old.entries) if old else 0)
        self._changed.add(row.number)
        self._unsaved.add(row.number)
        while self._entries > ENTRIES_MAX and len(self._rounds) > 1:
            oldest = self._order.pop(0)
            self._entries -= len(self._rounds.pop(oldest).entries)
            self._begins_after = max(self._begins_after, oldest)


def load_rounds(path: Path) -> list[Round]:
    """What the file holds, a round a line; a later line replaces an earlier one of the same round.

    Whatever is damaged, such as a tail that a crash cut off, is skipped. Blocks.
    """
    rounds: dict[int, Round] = {}
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("earlier rounds are not known: cannot read %s (%s)", path, error.strerror)
        return []
    for line in lines:
        with suppress(ValueError, TypeError, LookupError, RecursionError):
            row = Round.of(json.loads(line))
            rounds[row.number] = row
    return list(rounds.values())


def save_rounds(path: Path, rounds: Iterable[Round], *, anew: bool) -> bool:
    """Append rounds to the file or, if `anew`, replace it by them. Blocks.

    Returns whether it has grown so large that it is to be written anew next. Raises StorageError.
    """
    data = b"".join(dump(row.saved()) + b"\n" for row in rounds)
    try:
        if anew:
            write_atomically(path, data)
            return False
        with open(path, "ab") as file:
            file.write(data)
            return file.tell() > FILE_BYTES_MAX
    except OSError as error:
        raise cannot_write(path, error) from None
