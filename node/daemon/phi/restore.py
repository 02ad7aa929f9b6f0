"""Phi from a node's folder alone: the newest snapshot, and the fold over the records after it."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.phi.state import Merger
from gossamer.node.daemon.storage.chunks import ChunkStore, MissingChunkError
from gossamer.node.daemon.storage.records import RecordStore, StoredHistory
from gossamer.node.home import Home, manifest_of
from gossamer.protocol.access.acl import AccessList
from gossamer.protocol.claims import Claim
from gossamer.protocol.errors import DivergedError, PayloadError, PeerError, StorageError
from gossamer.protocol.identity import short
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payloads.chunks import payload_chunk_sizes
from gossamer.protocol.records import Delta

log = logging.getLogger("gossamer.restore")

ATTEMPTS_MAX = 8
"""How often a reader starts over because the running daemon has moved on."""


def restore_merger(
    manifest: Manifest, chunks: ChunkStore, history: StoredHistory, deltas: Sequence[Delta], own_id: bytes
) -> tuple[Merger | None, tuple[Claim, ...]]:
    """The state at the newest snapshot that is whole, if any, and the claims from that one on."""
    for place, claim in enumerate(history.claims):
        # For the newest we know what it holds. An older one held every record up to its round; otherwise its
        # digest does not match, and it is of no use.
        held = [
            delta
            for delta in deltas
            if (delta.record_id in history.covered if place == 0 else delta.round <= claim.round)
        ]
        merged: dict[int, tuple[Delta, ...]] = {}
        for delta in sorted(held, key=lambda d: (d.round, d.author)):
            merged[delta.round] = (*merged.get(delta.round, ()), delta)
        try:
            phi = snapshots.load(claim.root, manifest.plan().numel, chunks)
        except (MissingChunkError, PayloadError):
            continue
        merger = Merger(manifest, phi, chunks, own_id, base=history.base, merged=merged)
        if merger.chain() == claim.digest:
            return merger, history.claims[place:]
    return None, ()


def has_model(home: Home, manifest: Manifest) -> bool:
    """Whether a node's folder holds a model to start from. Raises StorageError."""
    if not home.ledger_path.exists():
        return False
    store = RecordStore(home.ledger_path, manifest.swarm_id, read_only=True)
    try:
        return bool(store.load_history().claims)
    finally:
        store.close()


def is_held(delta: Delta, chunks: ChunkStore) -> bool:
    """Whether a delta's whole payload is on disk, in chunks of the sizes that its record states.

    A chunk that turns out to be damaged is logged, and counts as missing.
    """
    sizes = payload_chunk_sizes(delta.body.payload_bytes)
    for blob, size in zip(delta.body.chunks, sizes, strict=True):
        was_here = blob in chunks
        if not chunks.fits(blob, size):
            if was_here and blob not in chunks:
                log.warning("chunk %s was damaged on disk; fetching it again", short(blob))
            return False
    return True


@dataclass(frozen=True, slots=True)
class _Stored:
    """A folder's records at one moment."""

    history: StoredHistory
    deltas: list[Delta]
    credentials: list[bytes]


def replay(home: Home, *, sealed: bool = False) -> tuple[Manifest, Merger]:
    """Phi as a node's folder has it: all that is merged by now or, with `sealed`, the newest snapshot.

    Only reads, and may do so beside a running daemon. The daemon may drop chunks while they are read here. It
    commits beforehand that it no longer needs them, so the fold then starts over from what it has committed.

    Raises ConfigError, StorageError or DivergedError.
    """
    manifest = manifest_of(home)
    read: StoredHistory | None = None
    for _ in range(ATTEMPTS_MAX):
        # Opened before the records are read: a payload that is dropped in between is then noticed as missing,
        # and not taken for one that never came.
        chunks = _chunks_of(home)
        stored = _read(home, manifest)
        if stored.history == read:
            raise StorageError(
                f"the model in {home.root} is damaged; start the node, which fetches what is missing"
            )
        read = stored.history
        with suppress(MissingChunkError):
            merger = _fold(home, manifest, chunks, stored, sealed=sealed)
            if merger is not None:
                _check_sound(merger, sealed)
                return manifest, merger
    raise StorageError(
        f"the node in {home.root} drops old snapshots faster than they can be read; stop it first"
    )


def _check_sound(merger: Merger, sealed: bool) -> None:
    """Raise DivergedError if the model has diverged, and so is of no use."""
    if merger.diverged:
        which = "model as of the newest snapshot" if sealed else "model"
        advice = "" if sealed else "; the newest snapshot may be from before: export it with --sealed"
        raise DivergedError(
            f"fragment {min(merger.diverged)} of the {which} reached a magnitude of 64: it diverged{advice}"
        )


def _chunks_of(home: Home) -> ChunkStore:
    """The chunks of a node's folder. Raises StorageError."""
    if not home.chunks_path.exists():
        raise _no_model(home)
    return ChunkStore(home.chunks_path, read_only=True)


def _read(home: Home, manifest: Manifest) -> _Stored:
    """The records of a node's folder. Raises StorageError, also if there is no snapshot to begin with."""
    if not home.ledger_path.exists():
        raise _no_model(home)
    store = RecordStore(home.ledger_path, manifest.swarm_id, read_only=True)
    try:
        with store.one_state():
            stored = _Stored(store.load_history(), store.load(manifest.plan()), store.load_credentials())
    finally:
        store.close()
    if not stored.history.claims:
        raise _no_model(home)
    return stored


def _no_model(home: Home) -> StorageError:
    return StorageError(f"{home.root} has no model yet; wait until the node has joined")


def _fold(
    home: Home, manifest: Manifest, chunks: ChunkStore, stored: _Stored, *, sealed: bool
) -> Merger | None:
    """The newest snapshot that is whole, and the records after it; None if there is no such snapshot.

    Raises MissingChunkError or StorageError.
    """
    # Phi does not depend on whose folder it is.
    merger, _ = restore_merger(manifest, chunks, stored.history, stored.deltas, own_id=bytes(32))
    if merger is None or sealed:
        return merger
    acl = _acl(home, manifest, stored.credentials)
    ledger = Ledger()
    ledger.close(stored.history.base.round)
    for delta in stored.deltas:
        if acl.counts(delta.author, delta.round):
            ledger.add(delta)
    horizon = max(ledger.horizon, stored.history.reach)
    merged = set(merger.merged_ids())
    for round_ in sorted({delta.round for delta in stored.deltas}):  # those with nothing that counts, too
        if round_ > horizon:
            break
        valid = ledger.valid(round_)
        merger.merge(round_, tuple(d for d in valid if d.record_id in merged or is_held(d, chunks)))
    return merger


def _acl(home: Home, manifest: Manifest, credentials: Sequence[bytes]) -> AccessList:
    """The access list, which says whose deltas count, by the credentials that a folder holds."""
    acl = AccessList(manifest.admission, manifest.swarm_id)
    invitation = home.invitation()
    for data in (*credentials, *([invitation.grant.data] if invitation else [])):
        with suppress(PeerError):
            acl.learn(data)
    return acl
