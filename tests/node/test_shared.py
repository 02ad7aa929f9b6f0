"""`gossamer.node.ipc.messages`: both sides see the same memory, part by part, and give it back."""

from __future__ import annotations

import errno
import gc
import os

import numpy as np
import psutil
import pytest

from gossamer.node.ipc.messages import SharedMemory
from tests.protocol.builders import LAYOUT, SMALL


def test_what_one_side_writes_the_other_reads(rng: np.random.Generator) -> None:
    daemon = SharedMemory.create(SMALL)
    trainer = SharedMemory(SMALL, os.dup(daemon.fd))
    values = {f.index: rng.integers(-100, 100, f.numel).astype(np.int32) for f in LAYOUT.fragments}
    for fragment in LAYOUT.fragments:
        daemon.phi(fragment)[:] = values[fragment.index]
    payload = rng.bytes(len(trainer.payload))
    trainer.payload[:] = payload
    for fragment in LAYOUT.fragments:
        assert np.array_equal(trainer.phi(fragment), values[fragment.index])
    assert bytes(daemon.payload) == payload
    for side in (daemon, trainer):
        side.close()
        side.close()
    assert np.array_equal(trainer.phi(LAYOUT.fragments[0]), values[0]), "the mapping outlives the descriptor"


def test_nothing_is_left_open() -> None:
    gc.collect()
    before = psutil.Process().num_fds()
    for _ in range(20):
        shared = SharedMemory.create(SMALL)
        view = shared.phi(LAYOUT.fragments[0])
        shared.close()
        del shared, view
    gc.collect()
    assert psutil.Process().num_fds() <= before


def test_nothing_is_left_open_where_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, size: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("gossamer.node.ipc.messages.mmap.mmap", refuse)
    gc.collect()
    before = psutil.Process().num_fds()
    with pytest.raises(OSError, match="memory"):
        SharedMemory.create(SMALL)
    assert psutil.Process().num_fds() <= before


def test_a_platform_without_anonymous_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    daemon = SharedMemory.create(SMALL)
    trainer = SharedMemory(SMALL, os.dup(daemon.fd))
    trainer.payload[:3] = b"abc"
    assert bytes(daemon.payload[:3]) == b"abc"
    daemon.close()
    trainer.close()
