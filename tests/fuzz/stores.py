"""Fuzz targets for what `node` reads: the trainer's socket, addresses, other nodes' answers, its own disk.

A disk is no adversary, but it flips bits and tears writes. A node must use what it finds in its folder, fetch
it again, or refuse it with one line.
"""

from __future__ import annotations

import atexit
import json
import shutil
import sqlite3
import tempfile
import zlib
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any

import msgpack
import numpy as np
import torch
from torch import nn

from gossamer.node.address import format_address, parse_address
from gossamer.node.daemon.network.rpc import parse_status
from gossamer.node.daemon.phi import snapshots
from gossamer.node.daemon.storage.chunks import MissingChunkError
from gossamer.node.daemon.storage.records import Base, RecordStore
from gossamer.node.ipc import messages as control
from gossamer.node.trainer.checkpoint import CheckpointWriter, restore
from gossamer.node.trainer.metrics import Progress
from gossamer.node.trainer.outer import OuterLoop
from gossamer.protocol.claims import Claim
from gossamer.protocol.errors import GossamerError, LocalError, StorageError
from gossamer.protocol.payloads.chunks import chunk_hashes, chunk_sizes
from tests.fuzz.decoders import SWARM
from tests.fuzz.forge import blobs_from, forge
from tests.fuzz.mutate import mutate_bytes, mutate_packed, mutate_value
from tests.fuzz.target import Target
from tests.protocol import builders


@cache
def _folder() -> Path:
    path = tempfile.mkdtemp(prefix="gossamer-fuzz-")
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return Path(path)


# --- the trainer's socket ----------------------------------------------------------------------------


def _control(data: bytes) -> Iterator[None]:
    length = control.frame_length(data[: control.LENGTH_BYTES])
    body = data[control.LENGTH_BYTES :][:length]
    message = control.decode(body)
    yield
    assert type(message) in control._KINDS.values()


def _control_seeds() -> list[bytes]:
    dice = Random(1)
    kinds = [*control._KINDS.values()] * 4
    found = [control.encode(forge(kind, dice, blobs_from([bytes(32)]))) for kind in kinds]
    return [*found, b"\xff" * 8, b""]


def _mutate_frame(data: bytes, dice: Random) -> bytes:
    if dice.randrange(6) == 0:
        return mutate_bytes(data, dice)
    body = mutate_packed(data[control.LENGTH_BYTES :], dice)
    return len(body).to_bytes(control.LENGTH_BYTES, "big") + body


# --- addresses and status ----------------------------------------------------------------------------


def _address(data: bytes) -> Iterator[None]:
    text = data.decode("utf-8", "surrogateescape")
    if ":" in text:
        yield
    try:
        host, port = parse_address(text)
    except LocalError as error:
        raise LocalError(ascii(str(error))) from None
    yield
    yield
    assert 1 <= port <= 65535
    assert host.isascii()
    host.encode("idna")  # as a look-up does
    assert parse_address(format_address(host, port)) == (host, port)


def _address_seeds() -> list[bytes]:
    good = (
        "127.0.0.1:7700",
        "[::1]:1",
        "[fe80::1%eth0]:80",
        "[fe80::1%eth0.7]:80",
        "a-b.example:65535",
        "localhost:07700",
        "host.:1",
    )
    return [text.encode() for text in (*good, "[::1]", "a:b:c", "１:1", "a:" + "9" * 5000, "a." * 200 + ":1")]


def _status(data: bytes) -> Iterator[None]:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        pass
    else:
        yield
    status = parse_status("host:1", data)
    assert {"swarm_id", "node_id"} <= status.keys()


def _status_seeds() -> list[bytes]:
    status = {
        "swarm_id": "00" * 32,
        "node_id": "11" * 32,
        "members": [{"name": "x", "loss": 1.5}],
        "round": 3,
    }
    return [
        json.dumps(status).encode(),
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"9" * 5000,
        b"\xff\xfe{\0",
        b"NaN",
    ]


def _mutate_json(data: bytes, dice: Random) -> bytes:
    if dice.randrange(3) == 0:
        return mutate_bytes(data, dice)
    try:
        return json.dumps(mutate_value(json.loads(data), dice), default=repr).encode()[:200_000]
    except (ValueError, RecursionError, TypeError):
        return mutate_bytes(data, dice)


# --- snapshots ---------------------------------------------------------------------------------------

NUMEL = 2**18 + 100
"""A little more than one whole chunk."""


class _Chunks(dict[bytes, bytes]):
    """A chunk store in memory."""

    def get(self, blob: bytes) -> bytes:  # type: ignore[override]
        if blob not in self:
            raise MissingChunkError(blob)
        return self[blob]


@cache
def _blobs() -> dict[bytes, bytes]:
    """Chunks that are there already: those of a snapshot, and of payloads of all sizes."""
    phi = np.arange(NUMEL, dtype="<i4").tobytes()
    pieces = [phi[: 2**20], phi[2**20 :], b"", b"x", bytes(400), bytes(2**20), bytes(401)]
    return {sha256(piece).digest(): piece for piece in pieces}


def _snapshot(data: bytes) -> Iterator[None]:
    chunks: Any = _Chunks(_blobs())
    root = sha256(data).digest()
    chunks[root] = data
    lacking = snapshots.missing(root, 4 * NUMEL, chunks)
    yield
    assert all(size in chunk_sizes(4 * NUMEL) for _, size in lacking)
    phi = snapshots.load(root, NUMEL, chunks)
    yield
    assert phi.shape == (NUMEL,)
    assert chunk_hashes(phi.tobytes()) == tuple(data[i : i + 32] for i in range(0, len(data), 32))


def _snapshot_seeds() -> list[bytes]:
    first, *_ = found = list(_blobs())
    return [first + other for other in found] + [b"".join(found), b""]


# --- records on disk ---------------------------------------------------------------------------------

FILE, ROWS = b"\0", b"\1"
"""First byte of an input: whether the rest is a database file, or the rows of its tables."""


def _store(data: bytes) -> Iterator[None]:
    path = _folder() / "ledger.sqlite"
    for old in _folder().glob("ledger.sqlite*"):
        old.unlink()
    if data[:1] == FILE:
        path.write_bytes(data[1:])
    elif not _write_rows(path, data[1:]):
        return
    store = RecordStore(path, SWARM)
    try:
        yield
        history = store.load_history()
        _check_history(history.base, history.own_last, history.claims)
        assert all(isinstance(record_id, bytes) for record_id in history.covered)
        for delta in store.load(builders.LAYOUT):
            assert delta.round >= 1
    finally:
        store.close()


def _check_history(base: Base, own_last: int, claims: tuple[Claim, ...]) -> None:
    for number in (base.round, base.tokens, own_last, *(n for c in claims for n in (c.round, c.tokens))):
        assert type(number) is int
        assert number >= 0
    for digest in (base.chain, *(blob for c in claims for blob in (c.digest, c.root))):
        assert type(digest) is bytes
        assert len(digest) == 32


def _write_rows(path: Path, data: bytes) -> bool:
    """Put rows into a new database; returns False if it does not take them."""
    RecordStore(path, SWARM).close()
    db = sqlite3.connect(path)
    try:
        deltas, kept, history = msgpack.unpackb(data)
        db.executemany("INSERT INTO deltas VALUES (?, ?, ?, ?)", deltas)
        db.executemany("INSERT INTO snapshots VALUES (?, ?, ?, ?, ?)", kept)
        db.executemany("INSERT INTO history VALUES (1, ?, ?, ?, ?)", history)
        db.commit()
    except (ValueError, TypeError, OverflowError, sqlite3.Error):
        return False
    finally:
        db.close()
    return True


def _store_seeds() -> list[bytes]:
    rng = np.random.default_rng(4)
    found = [builders.random_delta(rng, builders.identity(n), n + 1)[0] for n in range(4)]
    rows = msgpack.packb(
        [
            [[delta.record_id, delta.round, delta.data, 0] for delta in found],
            [[bytes(32), 16, 5, bytes(32), 1], [b"r" * 32, 32, 7, bytes(32), 2]],
            [[16, bytes(32), 3, 1]],
        ]
    )
    path = _folder() / "seed.sqlite"
    path.unlink(missing_ok=True)
    _write_rows(path, rows)
    return [ROWS + rows, FILE + path.read_bytes(), ROWS + msgpack.packb([[], [], []])]


def _mutate_store(data: bytes, dice: Random) -> bytes:
    if data[:1] == ROWS:
        return ROWS + mutate_packed(data[1:], dice)
    raw = bytearray(data)
    used = [at for at, byte in enumerate(raw) if byte and at]  # most of a small database is empty
    if not used or dice.randrange(4) == 0:
        return mutate_bytes(data, dice)
    raw[dice.choice(used)] = dice.randrange(256)
    return bytes(raw)


# --- the trainer's state -----------------------------------------------------------------------------


def _trainer() -> tuple[nn.Module, OuterLoop, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    named = dict(model.named_parameters())
    manifest = builders.manifest(tensors=tuple((name, tuple(p.shape), "mean") for name, p in named.items()))
    return model, OuterLoop(named, manifest), torch.optim.AdamW(model.parameters(), lr=1e-2)


def _train(model: nn.Module, outer: OuterLoop, optimizer: torch.optim.Optimizer) -> None:
    loss = model(torch.ones(2, 6)).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    outer.step(tokens=2, loss=loss.detach())


def _checkpoint(data: bytes) -> Iterator[None]:
    path = _folder() / "trainer.checkpoint"
    path.write_bytes(data)
    _, outer, optimizer = _trainer()
    taken_up = restore(path, outer, [optimizer])
    if taken_up is None:
        assert not optimizer.state_dict()["state"]
        assert not any(t.any() for s in outer.fragments for t in (*s.residual, *s.buffers["momentum"]))
        raise StorageError("not taken up")
    yield
    progress, _ = taken_up
    assert type(progress.steps) is int


def _checkpoint_seeds() -> list[bytes]:
    model, outer, optimizer = _trainer()
    path = _folder() / "seed.checkpoint"
    CheckpointWriter(path).save(outer, [optimizer], Progress(0, 0))
    early = path.read_bytes()
    for _ in range(3):
        _train(model, outer, optimizer)
    outer.publish(1, 1, memoryview(bytearray(10_000)))
    CheckpointWriter(path).save(outer, [optimizer], Progress(8, 16))
    return [path.read_bytes(), early]


def _mutate_checkpoint(data: bytes, dice: Random) -> bytes:
    """Change the trailer, mostly with a checksum that is right, which would catch nearly all changes; or any
    bytes."""
    start = len(data) - 12 - int.from_bytes(data[-12:-4])
    try:
        trailer = msgpack.packb(mutate_value(msgpack.unpackb(data[start:-12]), dice))
    except (ValueError, RecursionError, TypeError, OverflowError):
        return mutate_bytes(data, dice)
    if dice.randrange(4) == 0:
        return mutate_bytes(data, dice)
    whole = data[:start] + trailer + len(trailer).to_bytes(8)
    return whole + zlib.crc32(whole).to_bytes(4)


STORES = [
    Target("control", _control, _control_seeds, mutate=_mutate_frame),
    Target("address", _address, _address_seeds, errors=LocalError, mutate=mutate_bytes),
    Target("status", _status, _status_seeds, errors=LocalError, mutate=_mutate_json),
    Target("snapshot", _snapshot, _snapshot_seeds, errors=GossamerError, mutate=mutate_bytes, share=0.3),
    Target("recordstore", _store, _store_seeds, errors=StorageError, mutate=_mutate_store, share=0.05),
    Target(
        "checkpoint",
        _checkpoint,
        _checkpoint_seeds,
        errors=StorageError,
        mutate=_mutate_checkpoint,
        share=0.2,
    ),
]
