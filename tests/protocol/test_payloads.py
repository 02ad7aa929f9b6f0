"""Payloads: each value has one place, each payload its sections, and chunks travel packed."""

from __future__ import annotations

import tracemalloc
from hashlib import sha256
from itertools import accumulate
from unittest.mock import Mock, patch

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol import payloads
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.limits import CHUNK_BYTES_MAX, PAYLOAD_CHUNKS_MAX
from gossamer.protocol.payloads import (
    FORMS,
    PACKERS,
    WORTH_IT,
    Form,
    Layout,
    Payload,
    Section,
    TensorSpec,
    chunk_hashes,
    chunk_sizes,
    encode_payload,
    form_of,
    pack_chunk,
    packed_size,
    parse_index,
    payload_chunk_bytes,
    payload_chunk_sizes,
    payload_length,
    plan,
    root_of,
    split,
    unpack_chunk,
)
from tests.protocol import builders

SHAPES = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=30)


def _planned(shapes, data) -> tuple[list[TensorSpec], int, Layout]:
    """Tensors, their fragments, and what is planned; strips may be short, so that small tensors are cut."""
    tensors = [TensorSpec(f"t{i}", shape, "mean") for i, shape in enumerate(shapes)]
    fragments = data.draw(st.integers(1, len(tensors)))
    with patch.object(payloads, "STRIP", data.draw(st.sampled_from([4, payloads.STRIP]))):
        layout = plan(tensors, fragments)
        assert plan(tensors, fragments) == layout
        assert all(slot.start % payloads.STRIP == 0 for part in layout.fragments for slot in part.slots)
    return tensors, fragments, layout


@given(SHAPES, st.data())
def test_every_value_has_exactly_one_place(shapes, data):
    tensors, fragments, layout = _planned(shapes, data)
    assert len(layout.fragments) == fragments
    assert layout.numel == sum(t.numel for t in tensors)
    assert layout.snapshot_bytes == 4 * layout.numel
    firsts = dict(zip(tensors, accumulate((t.numel for t in tensors), initial=0), strict=False))
    phi, at = np.full(layout.numel, -1, dtype=np.int32), 0
    for number, fragment in enumerate(layout.fragments):
        assert (fragment.index, fragment.offset) == (number, at)
        at += fragment.numel
        inside = 0
        for slot in fragment.slots:
            assert (slot.offset, slot.span) == (inside, slice(inside, inside + slot.numel))
            assert slot.is_cut == (slot.numel < slot.spec.numel)
            values = np.arange(slot.spec.numel, dtype=np.int32)[slot.strip]
            phi[fragment.offset :][slot.span] = firsts[slot.spec] + values
            inside += slot.numel
        assert inside == fragment.numel
        order = [firsts[slot.spec] + slot.start for slot in fragment.slots]
        assert order == sorted(order), "tensors keep the manifest's order within a fragment"
    assert sorted(phi) == list(range(layout.numel))
    found = dict(layout.tensors(phi))
    assert found.keys() == set(tensors)
    for spec, values in found.items():
        assert list(values) == list(range(firsts[spec], firsts[spec] + spec.numel))


@given(SHAPES, st.data())
def test_fragments_are_balanced_and_none_is_empty(shapes, data):
    _, _, layout = _planned(shapes, data)
    sizes = [fragment.numel for fragment in layout.fragments]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= max(slot.numel for part in layout.fragments for slot in part.slots)


@pytest.mark.parametrize("fragments", [1, 2, 4, 16])
def test_a_tensor_larger_than_a_fragment_is_cut(fragments):
    """As the embedding of a GPT-2, beside its blocks. Its fragments are then of about equal size."""
    blocks = [TensorSpec(f"b{i}", (768, n * 768), "rda") for i in range(12) for n in (3, 1, 4, 4)]
    layout = plan([TensorSpec("wte", (50257, 768), "mean"), *blocks], fragments)
    share = layout.numel / fragments
    assert all(abs(fragment.numel / share - 1) < 0.1 for fragment in layout.fragments)
    cut = {slot.spec.name for fragment in layout.fragments for slot in fragment.slots if slot.is_cut}
    assert cut == ({"wte"} if fragments > 2 else set())


def test_a_known_plan():
    """Largest first into the lightest. A change here changes what every round means."""
    tensors = [TensorSpec(n, (s,), "mean") for n, s in [("a", 5), ("b", 9), ("c", 5), ("d", 2), ("e", 9)]]
    assert [[s.spec.name for s in f.slots] for f in plan(tensors, 2).fragments] == [
        ["a", "b", "d"],
        ["c", "e"],
    ]
    tensors = [TensorSpec(n, (s,), "mean") for n, s in [("a", 70_000), ("b", 300_000), ("c", 9)]]
    assert [[(s.spec.name, s.strip) for s in f.slots] for f in plan(tensors, 2).fragments] == [
        [("b", slice(0, 196_608))],
        [("a", slice(0, 70_000)), ("b", slice(196_608, 300_000)), ("c", slice(0, 9))],
    ]


@pytest.mark.parametrize("name", sorted(CODECS))
def test_cutting_a_tensor_changes_no_value(name, rng):
    codec, edge = CODECS[name], payloads.STRIP
    values = rng.normal(0, 3000, 2 * edge + 777).astype(np.int32)
    found = [codec.decode(memoryview(codec.encode(part)), part.size, 0, part.size)
             for part in (values, values[:edge], values[edge:])]  # fmt: skip
    assert np.array_equal(found[0], np.concatenate(found[1:]))


NAMES = sorted(CODECS)
FRAGMENT = max(builders.LAYOUT.fragments, key=lambda f: len(f.slots))
SEEDS = st.integers(0, 2**32 - 1)


def _payload(name: str, seed: int) -> tuple[list[np.ndarray], bytes]:
    tensors = builders.random_tensors(np.random.default_rng(seed), FRAGMENT, 1 << 15)
    return tensors, encode_payload(name, FRAGMENT, tensors)


@pytest.mark.parametrize("name", NAMES)
@given(seed=SEEDS)
def test_every_tensor_comes_back_as_its_codec_gives_it(name, seed):
    tensors, data = _payload(name, seed)
    assert len(data) <= payload_length(CODECS[name], FRAGMENT)
    payload = Payload(name, FRAGMENT, data)
    assert payload.tensors == len(FRAGMENT.slots) == len(tensors)
    for index, values in enumerate(tensors):
        alone = Section(name, memoryview(CODECS[name].encode(values)), values.size).decode()
        assert np.array_equal(payload.tensor(index), alone)
        if name == "exact":
            assert np.array_equal(payload.tensor(index), values)


@pytest.mark.parametrize("name", NAMES)
@given(seed=SEEDS, data=st.data())
def test_truncation_and_extension_raise(name, seed, data):
    _, payload = _payload(name, seed)
    cut = data.draw(st.integers(0, len(payload) - 1))
    for wrong in (payload[:cut], payload + b"\x00", payload + payload):
        with pytest.raises(PayloadError):
            Payload(name, FRAGMENT, wrong)


def test_as_many_tensors_as_slots():
    tensors, _ = _payload("int8", 1)
    for wrong in (tensors[:-1], [*tensors, tensors[0]]):
        with pytest.raises(ValueError):
            encode_payload("int8", FRAGMENT, wrong)


MIB = CHUNK_BYTES_MAX


@pytest.mark.parametrize("total", [0, 1, MIB - 1, MIB, MIB + 1, 3 * MIB])
def test_sizes_agree_with_what_is_cut(total):
    data = bytes(total)
    chunks = list(split(data))
    assert tuple(len(chunk) for chunk in chunks) == chunk_sizes(total)
    assert b"".join(chunks) == data
    assert chunk_hashes(data) == tuple(sha256(chunk).digest() for chunk in chunks)


@pytest.mark.parametrize(
    ("total", "size"),
    [
        (0, MIB // 4),
        (MIB // 4 * 64, MIB // 4),
        (MIB // 4 * 64 + 1, MIB // 2),
        (20 * MIB, MIB // 2),
        (1024 * MIB, MIB),
    ],
)
def test_payloads_are_cut_finer_than_files(total, size):
    assert payload_chunk_bytes(total) == size
    sizes = payload_chunk_sizes(total)
    assert sum(sizes) == total
    assert len(sizes) <= (64 if size < MIB else PAYLOAD_CHUNKS_MAX)


def test_index_of_a_file():
    data = bytes(2 * MIB) + b"rest"
    hashes = chunk_hashes(data)
    index = b"".join(hashes)
    assert parse_index(index, len(data)) == hashes
    assert root_of(hashes) == sha256(index).digest()
    for wrong, total in ((index[:-1], len(data)), (index + bytes(32), len(data)), (index, 4 * MIB), (b"", 1)):
        with pytest.raises(PayloadError, match="does not describe"):
            parse_index(wrong, total)


# --- packing


@pytest.mark.parametrize("form", [None, *FORMS.values()])
@given(piece=st.binary(max_size=200), times=st.integers(1, 300))
def test_what_comes_back_is_what_went_in(form: Form | None, piece: bytes, times: int) -> None:
    chunk = piece * (times * 4)
    frame = pack_chunk(chunk, form)
    if frame is None:
        return
    assert len(frame) <= WORTH_IT * len(chunk)
    assert packed_size(frame) == len(chunk)
    assert unpack_chunk(frame) == chunk


def test_parameters_are_packed_in_planes_and_codes_are_not(rng) -> None:  # type: ignore[no-untyped-def]
    extremes = np.array([0, 1, -1, 2**31 - 1, -(2**31)], "<i4").tobytes()
    weights = (rng.standard_normal(1 << 17) * 2**18).astype("<i4").tobytes() + extremes
    codes = encode_payload("int4", FRAGMENT, builders.random_tensors(rng, FRAGMENT, 1 << 15)) * 9
    for chunk, has_planes, ratio in (
        (weights, True, 0.7),
        (codes, False, 0.95),
        (weights + b"x", False, 0.95),
    ):
        frame = pack_chunk(chunk) or b""
        assert unpack_chunk(frame) == chunk
        assert form_of(frame).has_planes == has_planes and len(frame) < ratio * len(chunk)


def test_what_hardly_gets_smaller_is_not_packed(rng) -> None:  # type: ignore[no-untyped-def]
    assert pack_chunk(rng.bytes(97_000) + bytes(3_000)) is None
    assert pack_chunk(rng.bytes(90_000) + bytes(10_000)) is not None


def test_a_lack_of_memory_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library raises an error of its own for it, as for a damaged frame."""
    fails = Mock(side_effect=zstandard.ZstdError("cannot compress: Allocation error : not enough memory"))
    monkeypatch.setattr(zstandard, "ZstdCompressor", Mock(return_value=Mock(compress=fails)))
    with pytest.raises(MemoryError):
        pack_chunk(bytes(1000))


@given(changed=st.binary(min_size=1, max_size=4), place=st.integers(0, 10_000), cut=st.integers(0, 10_000))
def test_a_damaged_frame_is_refused_or_holds_as_much_as_it_says(changed: bytes, place: int, cut: int) -> None:
    frame = pack_chunk(bytes(range(256)) * 20 + bytes(3000)) or b""
    place, cut = place % len(frame), cut % len(frame)
    for wrong in (frame[:place] + changed + frame[place + len(changed) :], frame[:cut]):
        try:
            chunk = unpack_chunk(wrong)
        except PayloadError:
            continue
        assert len(chunk) == packed_size(wrong) <= CHUNK_BYTES_MAX


def _packed(number: int, size: int, body: bytes) -> bytes:
    return bytes([number]) + size.to_bytes(3) + body


def _claiming(size: int) -> bytes:
    """A chunk packed by zstd that says it holds so many zeros, and does."""
    return _packed(1, size, zstandard.ZstdCompressor(1).compress(bytes(size)))


BOMB = 64 * CHUNK_BYTES_MAX


@pytest.mark.parametrize("number", FORMS)
@pytest.mark.parametrize("size", [0, 4, 999, CHUNK_BYTES_MAX, CHUNK_BYTES_MAX + 1, 2**24 - 1])
def test_a_bomb_is_not_unpacked(number: int, size: int) -> None:
    """Whatever it says: no more than a chunk is ever in memory."""
    bomb = _packed(number, size, PACKERS[FORMS[number].packer].pack(bytes(BOMB)))
    tracemalloc.start()
    try:
        with pytest.raises(PayloadError):
            unpack_chunk(bomb)
        assert tracemalloc.get_traced_memory()[1] < 4 * CHUNK_BYTES_MAX
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("frame", [_packed(0, 4, b"data"), _packed(77, 4, b"data"), _packed(2, 3, b"data")])
def test_an_unknown_form_is_refused_and_so_are_planes_of_no_whole_values(frame: bytes) -> None:
    for read in (form_of, packed_size, unpack_chunk):
        with pytest.raises(PayloadError):
            read(frame)


def test_a_frame_that_does_not_tell_its_length_is_refused() -> None:
    compressor = zstandard.ZstdCompressor(1, write_content_size=False).compressobj()
    frame = compressor.compress(bytes(1000)) + compressor.flush()
    with pytest.raises(PayloadError, match="another length"):
        unpack_chunk(_packed(1, 1000, frame))


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"\1\0\0\x08\x28\xb5\x2f\xfd",
        _claiming(0),
        _claiming(1000)[:-1],
        _claiming(1000) + b"x",
        _claiming(1000) + _claiming(1000)[4:],
        _claiming(1000)[:4] + b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + _claiming(1000)[4:],
    ],
    ids=["nothing", "magic only", "empty", "cut", "trailing byte", "two frames", "skippable frame"],
)
def test_one_whole_frame_and_nothing_else(wrong: bytes) -> None:
    with pytest.raises(PayloadError):
        unpack_chunk(wrong)
