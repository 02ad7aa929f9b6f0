"""Packing: by measured speeds, the form that has a chunk's bytes at the receiver soonest."""

from __future__ import annotations

import os

import numpy as np
import pytest

from gossamer.node.daemon.storage import packing as module
from gossamer.node.daemon.storage.packing import Packing
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.payloads import FORMS, Chunk, Form, form_of, pack_chunk

ZSTD, PLANES = Form("zstd", False), Form("zstd", True)
MB = 1e6
PHI = np.random.default_rng(0).normal(0, 2**18, 1 << 18).astype("<i4").tobytes()
"""Packs to 0.65 of its size in planes, and to 0.82 as it is."""


class Clock:
    """A processor's time, which passes as packers of these speeds need it, in bytes a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, pack: float, unpack: float, lz4: float = 1.0) -> None:
        """`lz4`: how many times faster it packs."""
        self.now = 0.0
        self.calls, by = 0, {"zstd": 1.0, "lz4": lz4}
        self._slow(monkeypatch, "pack_chunk", pack, lambda data, form: len(data) / by[form.packer])
        self._slow(monkeypatch, "unpack_chunk", unpack, lambda frame: len(PHI))

    def __call__(self) -> float:
        return self.now

    def _slow(self, monkeypatch, name, speed, size) -> None:  # type: ignore[no-untyped-def]
        work = getattr(module, name)

        def slow(*arguments):  # type: ignore[no-untyped-def]
            self.now += size(*arguments) / speed
            self.calls += 1
            return work(*arguments)

        monkeypatch.setattr(module, name, slow)


def form(chunk: Chunk) -> Form | None:
    return None if chunk.frame is None else form_of(chunk.frame)


@pytest.mark.parametrize(
    ("pack", "unpack", "rate", "expected"),
    [
        (1000 * MB, 2000 * MB, 100 * MB, PLANES),
        (1000 * MB, 2000 * MB, 150 * MB, PLANES),
        (1000 * MB, 2000 * MB, 300 * MB, None),  # 1.5 ns a byte to pack and unpack, and 1.2 ns saved
        (4000 * MB, 4000 * MB, 300 * MB, PLANES),
        (100 * MB, 2000 * MB, 100 * MB, None),
        (1000 * MB, 50 * MB, 100 * MB, None),  # the receiver would wait for its own processor
    ],
)
def test_the_soonest_is_taken_by_measured_speeds(
    monkeypatch: pytest.MonkeyPatch, pack: float, unpack: float, rate: float, expected: Form | None
) -> None:
    packing = Packing(clock=Clock(monkeypatch, pack, unpack))
    for rate_now in (1.0, rate, rate, rate):  # what is unknown passes for fast, so it is tried
        packing.rate = rate_now
        chunk = packing.pack(PHI)
        if chunk.frame is not None:
            assert packing.unpack(chunk.frame) == PHI
    assert chunk.data == PHI and form(chunk) == expected


def test_what_lies_packed_costs_nothing_and_goes_so_until_unpacking_takes_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(monkeypatch, 100 * MB, 1000 * MB)
    packing = Packing(clock=clock)
    lying = packing.pack(PHI)
    packing.unpack(lying.as_it_travels)
    calls = clock.calls
    assert packing.to_send(lying, 200 * MB) == lying
    assert packing.to_send(lying, 500 * MB) == Chunk(PHI, None)
    assert clock.calls == calls, "nothing was packed again"
    plain = Chunk(PHI, None)
    for _ in FORMS:
        packing.to_send(plain, 200 * MB)  # tries another form
    assert packing.to_send(plain, 200 * MB) == plain
    assert packing.to_send(plain, 1 * MB) == lying


@pytest.mark.parametrize(("rate", "packer"), [(10 * MB, "zstd"), (100 * MB, "lz4"), (2000 * MB, None)])
def test_lz4_is_soonest_where_zstd_packs_too_slowly(
    monkeypatch: pytest.MonkeyPatch, rate: float, packer: str | None
) -> None:
    values = np.random.default_rng(0).standard_t(4, 1 << 18) * 2**14
    data = CODECS["exact"].encode(values.astype(np.int32))
    packing = Packing(clock=Clock(monkeypatch, 600 * MB, 4000 * MB, lz4=3.0))
    packing.rate = rate
    for _ in range(2 * len(FORMS)):
        chunk = packing.pack(data)
        packing.to_send(chunk, rate)
        if chunk.frame is not None:
            packing.unpack(chunk.frame)
    found = form(chunk)
    assert (found and found.packer) == packer


def test_speeds_are_smoothed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One slow chunk says little, and several change the choice."""
    packing = Packing(clock=Clock(monkeypatch, 2000 * MB, 8000 * MB))
    for rate in (1.0, 300 * MB, 300 * MB):
        packing.rate = rate
        packing.unpack(packing.pack(PHI).as_it_travels)
    monkeypatch.undo()
    packing._clock = Clock(monkeypatch, 700 * MB, 8000 * MB)
    found = [form(packing.pack(PHI)) for _ in range(30)]
    assert found[:2] == [PLANES] * 2 and found[-1] is None


def test_a_packer_chosen_by_hand_is_used_whatever_the_line() -> None:
    for choice, expected in (("none", None), ("lz4", Form("lz4", True)), ("zstd", PLANES)):
        packing = Packing(choice)  # type: ignore[arg-type]
        packing.rate = 1e12
        chunk = packing.pack(PHI)
        assert form(chunk) == expected
        assert packing.to_send(chunk, 1e12) is chunk


def test_what_hardly_gets_smaller_lies_and_goes_as_it_is() -> None:
    noise = os.urandom(100_000)
    packing = Packing()
    assert packing.pack(noise) == packing.to_send(Chunk(noise, None), 1.0) == Chunk(noise, None)
    assert pack_chunk(noise) is None
