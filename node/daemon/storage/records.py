"""Signed records on disk: SQLite in WAL mode, one database row per envelope.

Our own records are committed with a full sync before anybody hears of them ("write before you speak"), so
that a crash cannot make us sign another delta for the same round. Records of others are committed in batches;
anti-entropy brings back those that a crash loses.
"""

import asyncio
import errno
import logging
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.node.daemon.storage.disk import Disk
from gossamer.node.files import cannot_write
from gossamer.protocol.effects import StoreCredential
from gossamer.protocol.errors import PeerError, StorageError
from gossamer.protocol.history import folds
from gossamer.protocol.history.claims import chain, round_digest, total
from gossamer.protocol.history.folds import Folding
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.merge.merge import TokenCount
from gossamer.protocol.payloads import Layout
from gossamer.protocol.records import Claim, Delta, open_envelope, parse_delta

# --- The base under the rounds that can still change: closed history, in a few numbers.

Rounds = Mapping[int, tuple[Delta, ...]]
"""The records that are merged, by round."""


@dataclass(frozen=True, slots=True)
class Base:
    """All of history up to `round`, under the rounds that can still change."""

    round: int
    chain: bytes
    """Digest of the records merged up to the round, see `protocol.history.chain`."""
    tokens: int
    """The tokens that all those deltas count for, as stated in claims; see `token_count` and
    `Layout.trained_tokens`."""
    folds: bytes = b""
    """What the swarm has decided by them, packed (`protocol.history.folds`); empty as of round 0."""

    def chain_with(self, rounds: Rounds) -> bytes:
        """Digest of all merged records if these rounds lie on this base. Equal digests promise equal Phi."""
        digest = self.chain
        for round_ in sorted(rounds):
            digest = chain(digest, round_, round_digest(delta.record_id for delta in rounds[round_]))
        return digest

    def tokens_with(self, rounds: Rounds, manifest: Manifest) -> int:
        """The tokens that all merged records count for if these rounds lie on this base."""
        above = TokenCount(manifest, (delta for deltas in rounds.values() for delta in deltas))
        return total((self.tokens, above.total))

    def folds_with(self, upto: int, rounds: Rounds, manifest: Manifest) -> bytes:
        """What the swarm has decided as of a round at the end of an epoch if these rounds lie on this base,
        packed. Raises PayloadError."""
        decided = folds.unpack(self.folds, manifest)
        return Folding(manifest).as_of(upto, self.round, decided, rounds).pack(manifest)


GENESIS = Base(0, bytes(32), 0)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS swarm (id BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS deltas (
    record_id BLOB PRIMARY KEY, round INTEGER NOT NULL, envelope BLOB NOT NULL,
    covered INTEGER NOT NULL DEFAULT 0  -- whether the newest snapshot holds it
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS credentials (
    record_id BLOB PRIMARY KEY, envelope BLOB NOT NULL  -- grants and revocations
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS snapshots (
    root BLOB PRIMARY KEY, round INTEGER NOT NULL, tokens INTEGER NOT NULL, digest BLOB NOT NULL,
    number INTEGER NOT NULL  -- the highest is the newest
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS history (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    floor INTEGER NOT NULL, chain BLOB NOT NULL, tokens INTEGER NOT NULL, folds BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS newest (
    what TEXT PRIMARY KEY,  -- 'signed': by us; 'merged': where the records do not show that it may be
    round INTEGER NOT NULL
);
"""

FORMAT = 2
"""Version of the tables and of the chunks beside them, kept in `PRAGMA user_version`."""

_ADVICE = {
    sqlite3.SQLITE_CANTOPEN: "this user must be able to write to it and to its folder",
    sqlite3.SQLITE_READONLY: "this user must be able to write to it and to its folder",
    sqlite3.SQLITE_BUSY: "another program holds it: have it let go",
    sqlite3.SQLITE_LOCKED: "another program holds it: have it let go",
    sqlite3.SQLITE_IOERR: "check its disk, which is full or failed",
}
"""What to do about an error of SQLite; of any other, the file is damaged."""

_ADD_DELTA = (  # again, if the one that is here is damaged
    "INSERT INTO deltas (record_id, round, envelope) VALUES (?, ?, ?)"
    " ON CONFLICT DO UPDATE SET envelope = excluded.envelope"
)
_ADD_SNAPSHOT = (
    "INSERT OR REPLACE INTO snapshots SELECT ?, ?, ?, ?, 1 + COALESCE(MAX(number), 0) FROM snapshots"
)
_NOTE_NEWEST = "INSERT INTO newest VALUES (?, ?) ON CONFLICT DO UPDATE SET round = MAX(round, excluded.round)"

log = logging.getLogger("gossamer.records")


@dataclass(frozen=True, slots=True)
class StoredHistory:
    """What is kept of history: its closed part, the snapshots, and the records in the newest snapshot."""

    base: Base
    own_last: int
    """The last round that we have signed a delta for, 0 if none."""
    claims: tuple[Claim, ...]
    covered: frozenset[bytes]
    reach: int
    """The newest merged round that the records do not show the swarm to have reached, or an earlier one."""


class RecordStore:
    """The store of records. Blocking, and used from several worker threads: changes wait for each other.

    Every method raises StorageError.
    """

    def __init__(self, path: Path, swarm_id: bytes, *, read_only: bool = False) -> None:
        """Open or create the database; `read_only` leaves it as it is, to only look at a node's records.

        Raises StorageError if it is damaged, another swarm's, or of another format than is known here.
        """
        self._path = path
        self._swarm_id = swarm_id
        self._read_only = read_only
        self._changing = threading.Lock()
        with self._explained():
            self._db = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rwc'}",
                uri=True,
                check_same_thread=False,
                isolation_level=None,
                timeout=10,
            )
            try:
                self._open()
            except BaseException:
                self._db.close()
                raise

    def _open(self) -> None:
        """Check that the database is our swarm's and, unless it is read-only, make a new one so."""
        (self._format,) = self._db.execute("PRAGMA user_version").fetchone()
        if not self._format and not self._read_only:
            begun = f"PRAGMA user_version = {FORMAT}; INSERT INTO swarm VALUES (x'{self._swarm_id.hex()}');"
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.executescript(f"BEGIN; {_SCHEMA} {begun} COMMIT;")
            self._path.chmod(0o600)
            self._format = FORMAT
        if self._format not in (0, FORMAT):
            raise StorageError(f"{self._path} is of another release of Gossamer: use that one, or join anew")
        if self._rows("SELECT id FROM swarm") not in ([], [(self._swarm_id,)]):
            raise StorageError(f"{self._path} belongs to another swarm; choose another --dir")

    def close(self) -> None:
        """Close the database. Waits for a thread that still writes: SQLite would go on with a connection that
        is gone."""
        with self._changing:
            self._db.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of SQLite inside the block into a StorageError that says what to do."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where it quotes a damaged file
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the higher bits are details
            if code == sqlite3.SQLITE_FULL:
                raise cannot_write(self._path, OSError(errno.ENOSPC, "")) from None
            advice = _ADVICE.get(code, "if it is damaged, remove it: what others hold is fetched again")
            raise StorageError(f"cannot use the database {self._path} ({str(error)!a}): {advice}") from None

    # -- writing

    @contextmanager
    def _change(self, *, durable: bool = True) -> Iterator[sqlite3.Connection]:
        """All or nothing. With `durable`, the changes survive a power cut once done."""
        with self._changing, self._explained(), self._db as db:
            db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            db.execute("BEGIN IMMEDIATE")
            yield db

    def add(self, records: Iterable[Delta | StoreCredential], *, own: bool = False) -> None:
        """Commit records. Those of our `own`, and credentials, survive a power cut once this returns; a round
        that we signed is known even if its record is lost."""
        deltas, credentials = [], []
        for record in records:
            if isinstance(record, Delta):
                deltas.append((record.record_id, record.round, record.data))
            else:
                credentials.append((record.record_id, record.data))
        with self._change(durable=own or bool(credentials)) as db:
            db.executemany(_ADD_DELTA, deltas)
            db.executemany("INSERT OR REPLACE INTO credentials VALUES (?, ?)", credentials)
            if own:
                db.executemany(_NOTE_NEWEST, [("signed", round_) for _, round_, _ in deltas])

    def add_snapshot(self, claim: Claim, covered: Iterable[Delta], keep: Iterable[bytes]) -> None:
        """Note a snapshot that holds the records `covered`; of the older ones, `keep` those roots. Durable.

        Those that still wait to be added are added too, so that it is known what the snapshot holds.
        """
        rows = {delta.record_id: (delta.record_id, delta.round, delta.data) for delta in covered}
        with self._change() as db:
            db.execute(_ADD_SNAPSHOT, (claim.root, claim.round, claim.tokens, claim.digest))
            # Most were covered by the snapshot before, too: do not rewrite most of a long ledger.
            marked = {row[0] for row in db.execute("SELECT record_id FROM deltas WHERE covered = 1")}
            db.executemany(
                "UPDATE deltas SET covered = 0 WHERE record_id = ?", [(one,) for one in marked - rows.keys()]
            )
            db.executemany(
                "INSERT INTO deltas VALUES (?, ?, ?, 1) ON CONFLICT (record_id) DO UPDATE SET covered = 1",
                [row for record_id, row in rows.items() if record_id not in marked],
            )
            roots = [claim.root, *keep]
            marks = ",".join("?" * len(roots))
            db.execute(f"DELETE FROM snapshots WHERE root NOT IN ({marks})", roots)

    def begin_at(self, claim: Claim, own_last: int, decided: bytes = b"") -> None:
        """Begin history at a snapshot obtained from others: everything up to it is closed. Durable."""
        with self._change() as db:
            db.execute("DELETE FROM snapshots")
            db.execute("DELETE FROM newest WHERE what = 'merged'")
            db.execute(_ADD_SNAPSHOT, (claim.root, claim.round, claim.tokens, claim.digest))
            db.execute("UPDATE deltas SET covered = 0")
            self._close(db, Base(claim.round, claim.digest, claim.tokens, decided), own_last)

    def close_up_to(self, base: Base, own_last: int, gone: Iterable[bytes] = ()) -> None:
        """Drop the records that became part of the base, and those that do not count any more. Durable."""
        with self._change() as db:
            self._close(db, base, own_last)
            db.executemany("DELETE FROM deltas WHERE record_id = ?", [(one,) for one in gone])

    @staticmethod
    def _close(db: sqlite3.Connection, base: Base, own_last: int) -> None:
        db.execute("DELETE FROM deltas WHERE round <= ?", (base.round,))
        values = (base.round, base.chain, base.tokens, base.folds)
        db.execute("INSERT OR REPLACE INTO history VALUES (1, ?, ?, ?, ?)", values)
        db.execute(_NOTE_NEWEST, ("signed", own_last))

    def note_reach(self, round_: int) -> None:
        """Note that rounds up to `round_` were merged, although the records do not show that the swarm has
        reached it."""
        with self._change(durable=False) as db:
            db.execute(_NOTE_NEWEST, ("merged", round_))

    # -- reading

    @contextmanager
    def one_state(self) -> Iterator[None]:
        """Loads inside the block see one state, whatever a running daemon commits."""
        with self._explained(), self._db as db:
            db.execute("BEGIN")
            yield

    def load_credentials(self) -> list[bytes]:
        """The envelopes of all grants and revocations, in order of record id."""
        return [envelope for (envelope,) in self._rows("SELECT envelope FROM credentials ORDER BY record_id")]

    def load_history(self) -> StoredHistory:
        """Read back what `add_snapshot`, `begin_at` and `close_up_to` wrote."""
        base = self._rows("SELECT floor, chain, tokens, folds FROM history")
        claims = self._rows("SELECT round, tokens, digest, root FROM snapshots ORDER BY number DESC")
        covered = self._rows("SELECT record_id FROM deltas WHERE covered = 1")
        newest = dict(self._rows("SELECT what, round FROM newest"))
        return StoredHistory(
            Base(*base[0]) if base else GENESIS,
            newest.get("signed", 0),
            tuple(Claim(*claim) for claim in claims),
            frozenset(record_id for (record_id,) in covered),
            newest.get("merged", 0),
        )

    def load(self, layout: Layout) -> list[Delta]:
        """Read all deltas back, in order of round, checking signatures again.

        A database row that does not verify is left out: its record is fetched again from nodes that hold it.
        """
        found: list[Delta] = []
        rows = self._rows("SELECT envelope FROM deltas ORDER BY round")
        for (envelope,) in rows:
            with suppress(PeerError):
                found.append(parse_delta(open_envelope(envelope, self._swarm_id), layout))
        if (damaged := len(rows) - len(found)) and not self._read_only:
            log.warning("%d records in %s are damaged; they are fetched again", damaged, self._path)
        return found

    def _rows(self, query: str) -> list[Any]:
        """All rows; none if we only look at a node whose first start was cut short."""
        with self._explained():
            return self._db.execute(query).fetchall() if self._format else []


BACKLOG_MAX = 4096
"""Records that may wait to be written. Beyond that, links have to wait with the records that they bring."""


class RecordWriter:
    """Stores others' records as they come, all that wait in one transaction."""

    def __init__(self, store: RecordStore, disk: Disk) -> None:
        self._store = store
        self._disk = disk
        self._waiting: asyncio.Queue[Delta | StoreCredential] = asyncio.Queue()
        self._has_room = asyncio.Event()
        self._has_room.set()

    def add(self, record: Delta | StoreCredential) -> None:
        """Queue a record."""
        self._waiting.put_nowait(record)
        if self._waiting.qsize() > BACKLOG_MAX:
            self._has_room.clear()

    @property
    def has_room(self) -> bool:
        return self._has_room.is_set()

    async def room(self) -> None:
        """Wait while the backlog is too long, unless the disk takes nothing at all."""
        if self._disk.is_writable:
            await self._has_room.wait()

    async def drained(self) -> None:
        """Wait until everything queued is on disk."""
        await self._waiting.join()

    async def run(self) -> None:
        """Write until cancelled."""
        while True:
            batch = [await self._waiting.get()]
            while not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            await self._disk.write(self._store.add, batch)
            for _ in batch:
                self._waiting.task_done()
            if self._waiting.qsize() <= BACKLOG_MAX:
                self._has_room.set()
