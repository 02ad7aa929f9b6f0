"""Phi from a node's folder alone: the newest snapshot, and the fold over the records after it."""

from collections.abc import Sequence
from contextlib import suppress

from gossamer.node import snapshots
from gossamer.node.chunkstore import ChunkStore, MissingChunkError
from gossamer.node.home import Home
from gossamer.node.merger import Merger
from gossamer.node.recordstore import RecordStore, StoredHistory
from gossamer.protocol.admission import Charter
from gossamer.protocol.errors import ConfigError, PayloadError, PeerError, StorageError
from gossamer.protocol.history import Claim
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.records import Delta


def restore_merger(
    manifest: Manifest, chunks: ChunkStore, history: StoredHistory, deltas: Sequence[Delta], own_id: bytes
) -> tuple[Merger | None, tuple[Claim, ...]]:
    """The state at the newest snapshot that is whole, if any, and the claims from that one on."""
    for place, claim in enumerate(history.claims):
        # Of the newest we know what it holds; an older one held everything there was, or is of no use.
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
    store = RecordStore(home.ledger_path, manifest.swarm_id)
    try:
        return bool(store.load_history().claims)
    finally:
        store.close()


def is_held(delta: Delta, chunks: ChunkStore) -> bool:
    """Whether a delta's payload is on disk, all of it."""
    return all(blob in chunks for blob in delta.body.chunks)


def replay(home: Home) -> tuple[Manifest, Merger]:
    """Phi as a node's folder has it, also beside a running daemon. Raises ConfigError or StorageError."""
    manifest = home.manifest()
    if manifest is None or not home.ledger_path.exists():
        raise ConfigError(f"{home.root} is not the folder of a node; give one with --dir")
    chunks = ChunkStore(home.chunks_path)
    store = RecordStore(home.ledger_path, manifest.swarm_id)
    try:
        history = store.load_history()
        deltas = store.load(manifest.plan())
        credentials = store.load_credentials()
    finally:
        store.close()
    merger, _ = restore_merger(manifest, chunks, history, deltas, home.identity().node_id)
    if merger is None:
        raise StorageError(f"{home.root} has no model yet; wait until the node has joined")
    charter = _charter(home, manifest, credentials)
    ledger = Ledger()
    ledger.close(history.base.round)
    for delta in deltas:
        if charter.counts(delta.author, delta.round):
            ledger.add(delta)
    for round_ in sorted({delta.round for delta in deltas}):  # those with nothing that counts, too
        if round_ > ledger.horizon:
            break
        merger.merge(round_, tuple(d for d in ledger.valid(round_) if is_held(d, chunks)))
    return manifest, merger


def _charter(home: Home, manifest: Manifest, credentials: Sequence[bytes]) -> Charter:
    """Who counts, by what a folder holds."""
    charter = Charter(manifest.admission, manifest.swarm_id)
    invitation = home.invitation()
    for data in (*credentials, *([invitation.grant.data] if invitation else [])):
        with suppress(PeerError):
            charter.learn(data)
    return charter
