"""Payloads: sections one after another, cut exactly, and any damage found by the chunks' hashes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol.codecs import CODECS
from gossamer.protocol.errors import PayloadError
from gossamer.protocol.payloads import Payload, Section, encode_payload, payload_length
from tests.protocol import builders

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
