"""The trainer's encoders against the reference codecs: the same bytes, and the same decoded values."""

from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gossamer.node.trainer import encoders
from gossamer.node.trainer.encoders import KERNELS, Bucket, PayloadWriter, encode_piece, piece_numel, together
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.fixedpoint import VALUE_LIMIT, Ints
from gossamer.protocol.payloads import (
    Fragment,
    Payload,
    TensorSpec,
    encode_payload,
    payload_length,
    plan,
    section_starts,
)

PEAK = VALUE_LIMIT - 1
SIZES = [1, 2, 3, 63, 64, 65, 255, 256, 257, 511, 1023, 4095, 4096, 4097, 8192, 12_345]
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none")


def gaussian(rng: np.random.Generator, size: int) -> Ints:
    return (rng.normal(size=size) * 10.0 ** rng.uniform(0, 7)).astype(np.int32)


def heavy_tailed(rng: np.random.Generator, size: int) -> Ints:
    return np.clip(rng.standard_cauchy(size) * 10.0 ** rng.uniform(0, 7), -PEAK, PEAK).astype(np.int32)


def sparse(rng: np.random.Generator, size: int) -> Ints:
    """Mostly zeros, so that some blocks are empty and others hold fewer values than top-k sends."""
    return np.where(rng.random(size) < 10.0 ** -rng.uniform(1, 4), gaussian(rng, size), 0).astype(np.int32)


def zeros(rng: np.random.Generator, size: int) -> Ints:
    return np.zeros(size, dtype=np.int32)


def full_range(rng: np.random.Generator, size: int) -> Ints:
    return rng.integers(-PEAK, PEAK + 1, size, dtype=np.int32)


def extremes(rng: np.random.Generator, size: int) -> Ints:
    return rng.choice(np.array([-PEAK, PEAK, -PEAK + 1, 0], dtype=np.int32), size)


def tied(rng: np.random.Generator, size: int) -> Ints:
    """Few distinct magnitudes: which of many equal values top-k sends is up to the tie rule."""
    return rng.integers(-3, 4, size, dtype=np.int32) * np.int32(rng.integers(1, 2**28))


def powers_of_two(rng: np.random.Generator, size: int) -> Ints:
    """Every border of a bit length, and its neighbours."""
    magnitudes = (1 << rng.integers(0, 30, size)) + rng.integers(-1, 2, size)
    return (np.minimum(magnitudes, PEAK) * rng.choice([-1, 1], size)).astype(np.int32)


def scales(rng: np.random.Generator, size: int) -> Ints:
    """Blocks of all magnitudes side by side, so that every exponent occurs."""
    exponents = np.repeat(rng.uniform(0, 30, -(-size // 256)), 256)[:size]
    return (rng.uniform(-1, 1, size) * 2.0**exponents).astype(np.int32)


DISTRIBUTIONS = [gaussian, heavy_tailed, sparse, zeros, full_range, extremes, tied, powers_of_two, scales]

codecs = pytest.mark.parametrize("codec", sorted(CODECS))


def check(codec: str, values: Ints, device: str = "cpu") -> None:
    """Assert that encoding `values` gives the reference's bytes and decoded values."""
    tensor = torch.from_numpy(values.copy()).to(device)
    section = torch.empty(CODECS[codec].section_bytes(values.size), dtype=torch.uint8, device=device)
    decoded, start = torch.empty_like(tensor), 0
    for piece in tensor.split(piece_numel([codec], tensor)):
        encode_piece(codec, piece, start, section, decoded[start : start + piece.numel()])
        start += piece.numel()
    expected = CODECS[codec].encode(values)
    assert section.cpu().numpy().tobytes() == expected
    reference = CODECS[codec].decode(memoryview(expected), values.size, 0, values.size)
    np.testing.assert_array_equal(decoded.cpu().numpy(), reference)
    np.testing.assert_array_equal(tensor.cpu().numpy(), values, "the input was changed")


@codecs
@pytest.mark.parametrize("draw", DISTRIBUTIONS, ids=lambda draw: draw.__name__)
def test_encodes_like_the_reference(codec: str, draw, rng: np.random.Generator) -> None:
    for size in SIZES:
        check(codec, draw(rng, size))


@codecs
@given(data=st.data())
def test_encodes_any_values_like_the_reference(codec: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 700))
    check(codec, data.draw(arrays(np.int32, size, elements=st.integers(-PEAK, PEAK))))


@codecs
@given(size=st.integers(1, 9000), seed=st.integers(0, 2**32 - 1), draw=st.sampled_from(DISTRIBUTIONS))
def test_encodes_any_size_like_the_reference(codec: str, size: int, seed: int, draw) -> None:
    check(codec, draw(np.random.default_rng(seed), size))


@codecs
def test_pieces_do_not_show(codec: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    check(codec, gaussian(rng, encoders.PIECE_CPU + 4096 + 300))
    monkeypatch.setattr(encoders, "PIECE_CPU", 4096)
    for size in (3 * 4096, 2 * 4096 + 256, 5 * 4096 - 1):
        check(codec, scales(rng, size))


def fragment_of(*shapes: tuple[int, ...]) -> Fragment:
    return plan([TensorSpec(f"t{i}", shape, "rda") for i, shape in enumerate(shapes)], 1).fragments[0]


def encode_fragment(
    codec: str, fragment: Fragment, tensors: list[torch.Tensor], out: memoryview
) -> tuple[int, list[torch.Tensor]]:
    """Write a payload; returns its length, and the tensors decoded."""
    writer = PayloadWriter(codec, section_starts(CODECS[codec], fragment), out)
    decoded = [torch.empty_like(tensor) for tensor in tensors]
    for place, (values, result) in enumerate(zip(tensors, decoded, strict=True)):
        size, start = piece_numel([codec], values), 0
        for piece, target in zip(values.view(-1).split(size), result.view(-1).split(size), strict=True):
            writer.write([place], None, start, piece, target)
            start += piece.numel()
    return writer.finish(), decoded


@codecs
def test_a_fragment_is_encoded_like_the_reference_payload(codec: str, rng: np.random.Generator) -> None:
    fragment = fragment_of((5000,), (3, 3), (1,), (64, 80), (257,))
    arrays_ = [gaussian(rng, slot.numel).reshape(slot.spec.shape) for slot in fragment.slots]
    expected = encode_payload(codec, fragment, arrays_)
    memory = SharedMemory(create=True, size=payload_length(CODECS[codec], fragment) + 100)
    try:
        memory.buf[:] = b"\xaa" * memory.size
        length, decoded = encode_fragment(codec, fragment, [torch.from_numpy(a) for a in arrays_], memory.buf)
        data = bytes(memory.buf)
    finally:
        memory.close()  # raises BufferError if a tensor still refers to it
        memory.unlink()
    assert data[:length] == expected
    assert data[length:].strip(b"\xaa") == b"" or codec == "exact"
    payload = Payload(codec, fragment, expected)
    for index, (tensor, values) in enumerate(zip(decoded, arrays_, strict=True)):
        assert tensor.shape == values.shape
        np.testing.assert_array_equal(tensor.numpy().reshape(-1), payload.tensor(index))


@pytest.mark.parametrize("magnitude", [2**23 - 1, 2**23, 2**23 + 1])
def test_sums_of_blocks_at_the_border_of_int32(magnitude: int) -> None:
    """256 values of 2**23 are one too much for it."""
    values = np.full(512, magnitude, dtype=np.int32)
    values[1::2] *= -1
    values[256:] //= 3
    check("int4", values)


@pytest.mark.parametrize("codec", sorted(KERNELS))
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "any"])
@pytest.mark.parametrize("draw", DISTRIBUTIONS, ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_a_bucket_is_encoded_like_the_reference_payload(
    codec: str, is_alone: bool, device: str, draw, rng: np.random.Generator
) -> None:
    """Also where it can be encoded in any other codec as well."""
    for sizes in ([1], [64] * 5, [300, 1, 256, 65], rng.permutation(SIZES).tolist()):
        fragment = fragment_of(*((size,) for size in sizes))
        values = [draw(rng, size) for size in sizes]
        expected = encode_payload(codec, fragment, values)
        out = memoryview(bytearray(payload_length(CODECS[codec], fragment)))
        codecs = [codec] if is_alone else KERNELS
        starts = {one: section_starts(CODECS[one], fragment) for one in codecs}
        writer = PayloadWriter(codec, starts[codec], out)
        chosen = rng.permutation(len(sizes))
        for places in map(sorted, (chosen[::2].tolist(), chosen[1::2].tolist())):
            if not places:
                continue
            bucket = Bucket(starts, fragment, places, torch.device(device))
            padded = torch.zeros(bucket.numel, dtype=torch.int32, device=device)
            for place, row in zip(places, bucket.padded.of(padded), strict=True):
                row.copy_(torch.from_numpy(values[place]))
            decoded = torch.full_like(padded, 7)
            writer.write(places, bucket, 0, padded, decoded)
            for place, row in zip(places, bucket.padded.of(decoded), strict=True):
                reference = CODECS[codec].encode(values[place])
                read = CODECS[codec].decode(memoryview(reference), sizes[place], 0, sizes[place])
                np.testing.assert_array_equal(row.cpu().numpy(), read)
                row.zero_()
            assert not decoded.any(), "what pads a tensor stays zero"
        assert bytes(out[: writer.finish()]) == expected


def test_which_tensors_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoders, "PIECE_CPU", 1024)
    tensors = [torch.empty(size) for size in (100_000, 3, 300, 256, 1, 2, 250)]
    assert sorted(together(["exact"], tensors)) == [[i] for i in range(7)]
    for codec in ("int4", "topk"):
        assert together([codec], tensors) == [[4, 5, 1, 6], [3, 2], [0]], "whole blocks, no more than a piece"
    tensors[5] = tensors[5].double()
    assert together(["int4"], tensors) == [[4, 1, 6, 3], [5], [2], [0]]


@codecs
def test_a_fragment_without_tensors_is_an_empty_payload(codec: str) -> None:
    assert encode_fragment(codec, fragment_of(), [], memoryview(bytearray())) == (0, [])


def test_what_does_not_fit_is_refused() -> None:
    fragment = fragment_of((300,))
    values = torch.zeros(300, dtype=torch.int32)
    with pytest.raises(ValueError, match="needs 258 writable bytes, and there are 257"):
        encode_fragment("int4", fragment, [values], memoryview(bytearray(257)))
    with pytest.raises(ValueError, match="and there are 0"):
        encode_fragment("int4", fragment, [values], memoryview(bytes(1000)))


@NEEDS_CUDA
@codecs
def test_cuda_gives_the_same_bits(codec: str, rng: np.random.Generator) -> None:
    for draw in DISTRIBUTIONS:
        for size in (1, 3, 255, 4096, 4097, 100_001):
            check(codec, draw(rng, size), "cuda")


@NEEDS_CUDA
@codecs
def test_a_fragment_may_lie_on_several_devices(codec: str, rng: np.random.Generator) -> None:
    fragment = fragment_of((5000,), (3, 3), (257,))
    arrays_ = [gaussian(rng, slot.numel).reshape(slot.spec.shape) for slot in fragment.slots]
    tensors = [torch.from_numpy(a).to(d) for a, d in zip(arrays_, ("cuda", "cpu", "cuda"), strict=True)]
    out = bytearray(payload_length(CODECS[codec], fragment))
    length, decoded = encode_fragment(codec, fragment, tensors, memoryview(out))
    assert bytes(out[:length]) == encode_payload(codec, fragment, arrays_)
    assert [d.device.type for d in decoded] == ["cuda", "cpu", "cuda"]
