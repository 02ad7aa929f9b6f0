"""Codecs: sizes and errors as stated, and from wrong bytes a value in range or a PayloadError."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol.codecs import CODECS
from gossamer.protocol.codecs.base import GRAIN
from gossamer.protocol.codecs.topk import NOTHING
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.fixedpoint import VALUE_LIMIT
from gossamer.protocol.payloads import Section

NAMES = sorted(CODECS)
topks = pytest.mark.parametrize(("name", "run"), [("topk8", 8), ("topk16", 16), ("topk", 64)])
SIZES = st.one_of(st.integers(1, 700), st.sampled_from([255, 256, 257, 4095, 4096, 4097, 4352, 8192, 9000]))
SEEDS = st.integers(0, 2**32 - 1)
MAGNITUDES = st.integers(0, 29).map(lambda bits: 1 << bits)


def _decode(name: str, section: bytes, numel: int) -> np.ndarray:
    values = Section(name, memoryview(section), numel).decode()
    assert values.dtype == np.int32
    assert values.shape == (numel,)
    assert np.abs(values.astype(np.int64)).max() < VALUE_LIMIT
    return values


def _random(seed: int, numel: int, magnitude: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    kind = seed % 4
    values = rng.integers(-magnitude, magnitude + 1, numel)
    if kind == 1:  # bell-shaped, as deltas are
        values = np.clip(rng.normal(0, magnitude / 4, numel), -magnitude, magnitude)
    elif kind == 2:  # nearly all zero
        values = values * (rng.random(numel) < 0.02)
    elif kind == 3:  # blocks of very different size
        values = values >> (np.arange(numel) // 256 % 20)
    return values.astype(np.int32)


# --- round trip, error, size ------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@given(seed=SEEDS, numel=SIZES, magnitude=MAGNITUDES)
def test_encoding_is_of_stated_size_and_decodes(name, seed, numel, magnitude):
    codec = CODECS[name]
    section = codec.encode(_random(seed, numel, magnitude))
    assert len(section) == codec.section_bytes(numel)
    _decode(name, section, numel)


@pytest.mark.parametrize("name", NAMES)
@given(
    seed=SEEDS,
    numel=SIZES,
    magnitude=MAGNITUDES,
    grains=st.tuples(st.integers(0, 2), st.integers(1, 2)),
    factor=st.integers(-(2**17), 2**17),
    first=st.integers(0, 40),
    stride=st.integers(1, 40),
)
def test_a_part_is_cut_from_the_whole(name, seed, numel, magnitude, grains, factor, first, stride):
    """Decoding, adding and surveying from one multiple of the grain to the next, or to the end."""
    codec, sampling = CODECS[name], slice(first, None, stride)
    section = memoryview(codec.encode(_random(seed, numel, magnitude)))
    values = _decode(name, section, numel)
    start = min(grains[0], numel // GRAIN) * GRAIN
    stop = min(start + grains[1] * GRAIN, numel)
    part = values[start:stop]
    assert np.array_equal(codec.decode(section, numel, start, stop), part)
    sums = np.arange(part.size, dtype=np.int64)
    codec.accumulate(section, numel, start, factor, sums)
    assert np.array_equal(sums, np.arange(part.size) + part.astype(np.int64) * factor)
    squares, sample = codec.survey(section, numel, start, stop, sampling) if part.size else (0, part)
    assert squares == sum(int(v) ** 2 for v in part[part != 0])
    assert np.array_equal(sample, part[sampling])


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("exact", 32.0),
        ("int8", 8.04),
        ("int4", 4.04),
        ("int2", 2.04),
        ("topk8", 1.002),
        ("topk16", 0.502),
        ("topk", 0.127),
    ],
)
def test_bits_a_parameter(name, bits):
    numel = 2**20
    assert 8 * CODECS[name].section_bytes(numel) / numel <= bits


@given(seed=SEEDS, numel=SIZES, bits=st.integers(0, 30))
def test_exact_is_exact(seed, numel, bits):
    values = _random(seed, numel, min(1 << bits, VALUE_LIMIT - 1))
    assert np.array_equal(_decode("exact", CODECS["exact"].encode(values), numel), values)


@pytest.mark.parametrize(("name", "bits", "means", "eighths"), [("int8", 8, 0, 4), ("int4", 4, 2, 5)])
@given(seed=SEEDS, numel=SIZES, magnitude=MAGNITUDES)
def test_error_of_linear_codecs(name, bits, means, eighths, seed, numel, magnitude):
    """At most half a step, five eighths where values are brought nearer to 0, and a whole one where the
    largest positive level saturates."""
    values = _random(seed, numel, magnitude)
    section = CODECS[name].encode(values)
    decoded = _decode(name, section, numel)
    for number, start in enumerate(range(0, numel, 256)):
        block, image = values[start : start + 256].astype(np.int64), decoded[start : start + 256]
        magnitudes = np.abs(block)
        finest = 1 << min(max(0, int(magnitudes.max()).bit_length() - (bits - 1)), 30 - bits)
        step = 1 << section[number]
        assert finest <= step <= max(finest, means * magnitudes.mean())
        is_largest = section[number] == 30 - bits
        would_vanish = 8 * magnitudes.max() <= 10 * step  # at twice the step, which is not coarser then
        is_coarsest = 2 * step > means * (magnitudes.mean() - 1)
        assert step == finest or is_largest or would_vanish or is_coarsest
        error = np.abs(block - image)
        top = image == (2 ** (bits - 1) - 1) * step
        assert 8 * error[~top].max(initial=0) <= eighths * step
        assert error.max() <= step


@pytest.mark.parametrize("numel", [1, 256])
def test_int4_sends_something_of_a_block_whose_values_are_all_as_large(numel):
    """As after an optimizer's first step, or of a tensor that is one number."""
    for magnitude in range(1, 2**16, 97):
        values = np.full(numel, magnitude, dtype=np.int32)
        values[numel // 2 :] *= -1
        decoded = _decode("int4", CODECS["int4"].encode(values), numel)
        assert np.array_equal(np.sign(decoded), np.sign(values))
        assert 5 * np.abs(decoded - values).max() <= 3 * magnitude


def test_int4_sends_what_stands_alone_in_its_block():
    """One value among zeros is not cut to a few times their mean."""
    values = np.zeros(256, dtype=np.int32)
    values[77] = -(2**20)
    assert np.array_equal(_decode("int4", CODECS["int4"].encode(values), 256), values)


@pytest.mark.parametrize("name", sorted({*NAMES} - {"exact"}))
def test_values_beyond_the_largest_level_saturate(name):
    for value in (VALUE_LIMIT - 1, 1 - VALUE_LIMIT):
        values = np.full(4096, value, dtype=np.int32)
        decoded = _decode(name, CODECS[name].encode(values), 4096)
        chosen = decoded[decoded != 0]
        assert chosen.size >= 64
        assert np.all(np.sign(chosen) == np.sign(value))
        assert np.abs(chosen).min() >= 1 << 28


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zero(name):
    for numel in (1, 255, 256, 300, 4096, 5000):
        zeros = np.zeros(numel, dtype=np.int32)
        assert not _decode(name, CODECS[name].encode(zeros), numel).any()


@given(seed=SEEDS, numel=SIZES, magnitude=MAGNITUDES)
def test_int2_takes_the_nearest_of_its_four_levels(seed, numel, magnitude):
    values = _random(seed, numel, magnitude)
    section = CODECS["int2"].encode(values)
    decoded = _decode("int2", section, numel)
    for number, start in enumerate(range(0, numel, 256)):
        block, image = values[start : start + 256].astype(np.int64), decoded[start : start + 256]
        if not block.any():
            assert section[number] == 255
            continue
        unit = 1 << section[number]
        levels = np.array([-3, -1, 1, 3]) * unit
        nearest = np.abs(block[:, None] - levels).min(axis=1)
        assert np.array_equal(np.abs(block - image), nearest)


@topks
@given(seed=SEEDS, numel=SIZES, magnitude=MAGNITUDES)
def test_topk_sends_the_largest_of_each_run_as_the_nearest_level(name, run, seed, numel, magnitude):
    values = _random(seed, numel, magnitude)
    section = CODECS[name].encode(values)
    decoded = _decode(name, section, numel)
    for start in range(0, numel, run):
        part, image = values[start : start + run].astype(np.int64), decoded[start : start + run]
        unit = 1 << section[start // 4096]
        place = int(np.abs(part).argmax())
        levels = np.array([-3, -2, 0, 2, 3]) * unit
        if place == 63:
            levels = levels[1:]  # -3 there would be NOTHING
        assert not np.delete(image, place).any()
        assert image[place] in levels
        assert abs(part[place] - image[place]) == np.abs(part[place] - levels).min()


@topks
def test_topk_and_error_feedback_send_everything_in_the_end(name, run, rng):
    target = rng.normal(0, 1000, 4096).astype(np.int32)
    residual, sent = np.zeros_like(target), np.zeros_like(target)
    for number in range(400):
        x = residual + (target if number == 0 else 0)
        decoded = _decode(name, CODECS[name].encode(x), 4096)
        residual, sent = x - decoded, sent + decoded
    assert np.array_equal(residual + sent, target)
    assert np.abs(residual).mean() < 0.05 * np.abs(target).mean()


# --- wrong bytes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@given(seed=SEEDS, numel=SIZES, data=st.data())
def test_truncated_and_extended_sections_raise(name, seed, numel, data):
    section = CODECS[name].encode(_random(seed, numel, 1 << 12))
    cut = data.draw(st.integers(0, len(section) - 1))
    for wrong in (section[:cut], section + b"\x00", section + section):
        with pytest.raises(PayloadError):
            Section(name, memoryview(wrong), numel)


@pytest.mark.parametrize(
    ("name", "exponent", "accepted"),
    [
        ("int8", 22, True),
        ("int8", 23, False),
        ("int8", 255, False),
        ("int4", 26, True),
        ("int4", 27, False),
        ("int4", 255, False),
        ("int2", 27, True),
        ("int2", 28, False),
        ("int2", 254, False),
        ("int2", 255, True),
        ("topk", 27, True),
        ("topk", 28, False),
        ("topk", 255, False),
        ("topk8", 27, True),
        ("topk8", 28, False),
    ],
)
@pytest.mark.parametrize("filling", [0, 255])
def test_exponents_are_bounded(name, exponent, accepted, filling):
    section = bytearray(CODECS[name].encode(np.arange(1, 257, dtype=np.int32)))
    section[1:] = bytes([filling]) * (len(section) - 1)
    section[0] = exponent
    if accepted:
        _decode(name, bytes(section), 256)
    else:
        with pytest.raises(PayloadError, match="exponent"):
            _decode(name, bytes(section), 256)


# --- exact: planes ----------------------------------------------------------------------------------


def test_exact_refuses_values_out_of_range():
    for value in (VALUE_LIMIT, -VALUE_LIMIT, 2**31 - 1, -(2**31)):
        zigzag = (value << 1) ^ (value >> 31)
        section = np.array([zigzag & 0xFFFFFFFF], dtype="<u4").tobytes()
        with pytest.raises(PayloadError, match="outside"):
            CODECS["exact"].decode(memoryview(section), 1, 0, 1)


# --- topk: entries ----------------------------------------------------------------------------------


@topks
@pytest.mark.parametrize(("runs", "rest"), [(1, 5), (1, 1), (4096, 3), (2, 0)])
def test_topk_positions_lie_within_the_tensor(name, run, runs, rest):
    numel, last = runs * run + rest, (rest - 1) % run
    section_length = CODECS[name].section_bytes(numel)
    for entry in range(256):
        section = bytes(section_length - 1) + bytes([entry])
        if entry == NOTHING or entry % run <= last:
            decoded = _decode(name, section, numel)
            assert (decoded[-1] != 0) == (entry != NOTHING and entry % run == last)
            continue
        with pytest.raises(PayloadError, match="past the last"):
            CODECS[name].decode(memoryview(section), numel, 0, numel)
        with pytest.raises(PayloadError, match="past the last"):
            start = numel // GRAIN * GRAIN
            CODECS[name].decode(memoryview(section), numel, start, numel)


# --- the wire form, byte for byte --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("exact", "a65788e3685457fe"),
        ("int8", "d44fe28b8b2fffbf"),
        ("int4", "2ed101e5b3fbb2d8"),
        ("int2", "bbe446d2ddc88a4b"),
        ("topk8", "cbbe8f37c472ddf5"),
        ("topk16", "d95fe2fd0176a2e3"),
        ("topk", "5ac1ffd16533d024"),
    ],
)
def test_bytes_are_written_as_ever(name, digest):
    """A change is a sender's own matter, as long as others read the same: see the next test."""
    values = np.concatenate(
        [((np.arange(5000, dtype=np.int64) * 2654435761) % (1 << 20)) - (1 << 19), np.arange(-300, 300)]
    ).astype(np.int32)
    section = CODECS[name].encode(values)
    decoded = _decode(name, section, values.size)
    wire = section if name != "exact" else b""  # lz4 may pack the same bytes differently, some day
    assert sha256(wire + decoded.astype("<i4").tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize(
    ("name", "highest", "digest"),
    [
        ("int8", 22, "c954c42875aae8e7"),
        ("int4", 26, "7d0fa477ce4563c0"),
        ("int2", 27, "b9942b5de4446210"),
        ("topk8", 27, "caa3257795e661d4"),
        ("topk16", 27, "4b25c12e21ef4acf"),
        ("topk", 27, "5c7b39bc54ef8434"),
    ],
)
def test_bytes_are_read_as_in_protocol_version_2(name, highest, digest):
    """A change here splits every swarm: it needs a new version."""
    length, blocks = CODECS[name].section_bytes(8192), 2 if name.startswith("topk") else 32
    section = (np.arange(length, dtype=np.int64) * 2654435761 >> 7).astype(np.uint8)
    section[:blocks] = np.arange(blocks) * 5 % (highest + 1)
    decoded = _decode(name, section.tobytes(), 8192)
    assert np.unique(decoded).size > 8
    assert sha256(decoded.astype("<i4").tobytes()).hexdigest()[:16] == digest
