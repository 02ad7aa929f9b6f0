"""Phi from a node's folder alone: the newest snapshot, and the fold over the records after it."""

from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from typing import TypeVar

from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.phi.state import PhiState, Snapshot
from gossamer.node.daemon.storage.chunks import ChunkStore, MissingChunkError
from gossamer.node.daemon.storage.records import RecordStore, StoredHistory
from gossamer.node.home import Home, manifest_of
from gossamer.protocol.access.acl import AccessList
from gossamer.protocol.errors import DivergedError, PayloadError, PeerError, StorageError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.history.folds import folds_bytes
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payloads import payload_chunk_sizes
from gossamer.protocol.records import Claim, Delta

Read = TypeVar("Read")

ATTEMPTS_MAX = 3
"""How often a reader starts over because the running daemon has moved on."""


def restore_state(
    manifest: Manifest, chunks: ChunkStore, history: StoredHistory, deltas: Sequence[Delta], own_id: bytes
) -> tuple[PhiState | None, tuple[Claim, ...]]:
    """The state at the newest snapshot that is whole, if any, and the claims from that one on."""
    layout = manifest.plan()
    for place, claim in enumerate(history.claims):
        # For the newest we know what it holds. An older one held every record up to its round; otherwise its
        # digest does not match, and it is of no use.
        merged: dict[int, tuple[Delta, ...]] = {}
        for delta in sorted(deltas, key=lambda d: (d.round, d.author)):
            if delta.record_id in history.covered if place == 0 else delta.round <= claim.round:
                merged[delta.round] = (*merged.get(delta.round, ()), delta)
        try:
            phi = snapshots.load(claim, layout.numel, chunks, folds_bytes(manifest))
            sums = snapshots.read_index(claim.root, layout.snapshot_bytes, chunks).sums
        except (MissingChunkError, PayloadError):
            continue
        sealed = Snapshot(claim.round, merged, sums)
        state = PhiState(manifest, phi, chunks, own_id, base=history.base, merged=merged, sealed=sealed)
        if state.chain() == claim.digest:
            return state, history.claims[place:]
    return None, ()


def has_model(home: Home, manifest: Manifest) -> bool:
    """Whether a node's folder holds a model to start from. Raises StorageError."""
    if not home.ledger_path.exists():
        return False
    with closing(RecordStore(home.ledger_path, manifest.swarm_id, read_only=True)) as store:
        return bool(store.load_history().claims)


def is_held(delta: Delta, chunks: ChunkStore) -> bool:
    """Whether a delta's whole payload is on disk, in chunks of the sizes that its record states."""
    sizes = payload_chunk_sizes(delta.body.payload_bytes)
    return all(chunks.fits(blob, size) for blob, size in zip(delta.body.chunks, sizes, strict=True))


def replay(home: Home, *, sealed: bool = False) -> tuple[Manifest, PhiState]:
    """Phi as a node's folder has it: all that is merged by now or, with `sealed`, the newest snapshot.

    Only reads, and may do so beside a running daemon. Raises ConfigError, StorageError or DivergedError.
    """
    return _read(home, sealed, lambda state: state)


def averaged(home: Home, *, sealed: bool = False) -> tuple[Manifest, PhiState, Ints]:
    """The same, and the averaged model as of the newest round in it: int32[numel] (`history.average`)."""
    for _ in range(ATTEMPTS_MAX):  # a running daemon drops a snapshot's sums once it has committed another
        manifest, (state, found) = _read(home, sealed, lambda state: (state, state.average()))
        if found is not None:
            return manifest, state, found[1]
    raise StorageError(
        "this node has joined and is still fetching what the averaged model is made of: wait, or use the live"
        " model (--live)"
    )


def _read(home: Home, sealed: bool, read: Callable[[PhiState], Read]) -> tuple[Manifest, Read]:
    """What `read` makes of the state in a folder.

    A running daemon may drop chunks while they are read here. It commits beforehand that it no longer needs
    them, so the fold then starts over from what it has committed.
    """
    manifest = manifest_of(home)
    for _ in range(ATTEMPTS_MAX):
        with suppress(MissingChunkError):
            state = _fold(home, manifest, sealed=sealed)
            if state.diverged:
                which = "model as of the newest snapshot" if sealed else "model"
                advice = "" if sealed else "; the newest snapshot may be from before: export it with --sealed"
                raise DivergedError(
                    f"fragment {min(state.diverged)} of the {which} reached a magnitude of 64: it"
                    f" diverged{advice}"
                )
            return manifest, read(state)
    raise StorageError(f"the model in {home.root} is damaged; start the node, which fetches what is missing")


def _fold(home: Home, manifest: Manifest, *, sealed: bool) -> PhiState:
    """The newest snapshot that is whole and, unless `sealed`, what the swarm has published after it.

    Raises MissingChunkError, also if no snapshot is whole, or StorageError.
    """
    no_model = StorageError(f"{home.root} has no model yet; wait until the node has joined")
    if not home.ledger_path.exists() or not home.chunks_path.exists():
        raise no_model
    # Opened before the records are read: a payload that is dropped in between is then noticed as missing, and
    # not taken for one that never came.
    chunks = ChunkStore(home.chunks_path, read_only=True)
    opened = closing(RecordStore(home.ledger_path, manifest.swarm_id, read_only=True))
    with opened as store, store.one_state():
        history, deltas = store.load_history(), store.load(manifest.plan())
        credentials = store.load_credentials()
    if not history.claims:
        raise no_model
    # Phi does not depend on whose folder it is.
    state, _ = restore_state(manifest, chunks, history, deltas, own_id=bytes(32))
    if state is None:
        raise MissingChunkError(history.claims[0].root)
    if not sealed:
        acl = AccessList(manifest.admission, manifest.swarm_id)
        invitation = home.invitation()
        for data in (*credentials, *([invitation.grant.data] if invitation else [])):
            with suppress(PeerError):
                acl.learn(data)
        ledger = Ledger()
        ledger.close(history.base.round)
        for delta in deltas:
            if acl.counts(delta.author, delta.round):
                ledger.add(delta)
        reached = max(ledger.horizon, history.reach)
        merged = set(state.merged_ids())
        for round_ in sorted({delta.round for delta in deltas}):  # those with nothing that counts, too
            if round_ <= reached:
                valid = ledger.valid(round_)
                state.merge(round_, tuple(d for d in valid if d.record_id in merged or is_held(d, chunks)))
    return state
