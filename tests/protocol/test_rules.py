"""The averaging rules by themselves: order, bits, resistance, and what happens where directions cancel.

`test_merge.py` has what all of them promise as part of a merge.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from hashlib import sha256
from math import inf, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol.fixedpoint import VALUE_LIMIT
from gossamer.protocol.payloads import Payload, encode_payload
from gossamer.protocol.rules import RULES, Deltas
from gossamer.protocol.rules.base import Rule, shrink_to, usual_rate, usual_rates, whole
from gossamer.protocol.rules.rda import RESULTANT_MIN
from tests.protocol import builders
from tests.protocol.builders import norm

SEEDS = st.integers(0, 2**32 - 1)


def _whole(rule: Rule) -> Callable[[Deltas], np.ndarray]:
    return lambda given: whole(rule(given), given.numel)


STEPS = {name: _whole(rule) for name, rule in RULES.items()}
"""Every rule, giving a tensor's step as one array."""

centered_clip, radial_directional = STEPS["centered-clip"], STEPS["rda"]


def deltas(
    vectors: list[np.ndarray], weights: list[float] | None = None, steps: list[int] | None = None
) -> Deltas:
    values = [np.asarray(v).astype(np.int32) for v in vectors]
    norms, root_steps = [norm(v) for v in values], [sqrt(s) for s in steps or [10] * len(values)]
    return Deltas(
        vectors=[builders.Plain(v) for v in values],
        weights=weights or [1.0] * len(values),
        norms=norms,
        shrink=[1.0] * len(values),
        root_steps=root_steps,
        usual=usual_rate(norms, root_steps),
    )


def several(rng: np.random.Generator, count: int, numel: int, spread: float = 0.5) -> list[np.ndarray]:
    """Deltas that share a direction: a common part and noise of about its length."""
    common = rng.normal(0, 1e5, numel)
    return [common * rng.uniform(1 - spread, 1 + spread) + rng.normal(0, 1e5, numel) for _ in range(count)]


# --- all rules


@pytest.mark.parametrize("rule", STEPS.values(), ids=STEPS)
@given(seed=SEEDS, count=st.integers(1, 9), numel=st.integers(1, 100))
def test_order_does_not_matter(rule, seed, count, numel):
    rng = np.random.default_rng(seed)
    vectors = several(rng, count, numel)
    weights = [float(w) for w in rng.uniform(1, 1e6, count)]
    steps = [int(s) for s in rng.integers(1, 100, count)]
    order = rng.permutation(count)
    shuffled = deltas([vectors[i] for i in order], [weights[i] for i in order], [steps[i] for i in order])
    assert np.array_equal(rule(shuffled), rule(deltas(vectors, weights, steps)))


VECTOR = st.sampled_from(["most", "least", "one", "bell", "mirrored"])


@pytest.mark.parametrize("rule", STEPS.values(), ids=STEPS)
@given(
    kinds=st.lists(VECTOR, min_size=1, max_size=8),
    numel=st.integers(1, 20),
    seed=SEEDS,
    weights=st.lists(st.floats(1e-9, 1e18), min_size=8, max_size=8),
    steps=st.lists(st.integers(1, 2**24), min_size=8, max_size=8),
)
def test_nothing_raises_and_nothing_overflows(rule, kinds, numel, seed, weights, steps):
    bell = np.random.default_rng(seed).normal(0, 1e6, numel).astype(np.int32)
    made = {
        "most": np.full(numel, VALUE_LIMIT - 1),
        "least": np.full(numel, 1 - VALUE_LIMIT),
        "one": np.eye(1, numel)[0],
        "bell": bell,
        "mirrored": -bell,
    }
    count = len(kinds)
    vectors = [made[kind] for kind in kinds]
    result = rule(deltas(vectors, weights[:count], steps[:count]))
    assert result.dtype == np.int32 and result.shape == (numel,)
    assert norm(result) <= max(norm(v.astype(np.int32)) for v in vectors) * 1.001 + sqrt(numel)


@pytest.mark.parametrize("rule", STEPS.values(), ids=STEPS)
@given(seed=SEEDS, count=st.integers(1, 9))
def test_equal_deltas_are_returned(rule, seed, count):
    vector = np.random.default_rng(seed).normal(0, 1e5, 100).astype(np.int32)
    assert np.abs(rule(deltas([vector] * count)) - vector).max() <= 1


# --- centered-clip


def _reference(vectors: list[np.ndarray], weights: list[float], steps: list[int]) -> np.ndarray:
    """The paper's iteration in float64, with the median distance as radius."""
    x = np.array([np.asarray(v).astype(np.int32) for v in vectors], dtype=np.float64)
    p = np.array(weights) / np.sum(weights)
    centre, radius = np.zeros(x.shape[1]), np.inf
    for _ in range(3 if len(x) >= 3 else 1):
        rates = np.linalg.norm(x - centre, axis=1) / np.sqrt(steps)
        reach = np.ones(len(x))
        if len(x) > 1:
            radius = min(radius, statistics.median_low(rates))
            over = rates > radius
            reach[over] = radius / rates[over]
        centre = centre + ((p * reach)[:, None] * (x - centre)).sum(axis=0)
    return centre


@given(seed=SEEDS, count=st.integers(1, 9), numel=st.integers(1, 200))
def test_centered_clip_is_the_papers_iteration(seed, count, numel):
    rng = np.random.default_rng(seed)
    vectors = several(rng, count, numel)
    weights = [float(w) for w in rng.uniform(1, 100, count)]
    steps = [int(s) for s in rng.integers(1, 100, count)]
    expected = _reference(vectors, weights, steps)
    error = centered_clip(deltas(vectors, weights, steps)) - expected
    assert np.linalg.norm(error) <= sqrt(numel) + 1e-3 * np.linalg.norm(expected)


@given(
    seed=SEEDS,
    honest=st.integers(2, 8),
    length=st.sampled_from([10.0, 1e3, 1e9]),
    alike=st.booleans(),
    data=st.data(),
)
def test_centered_clip_resists_a_minority_of_giants(seed, honest, length, alike, data):
    """Wherever they point: the result stays within the longest honest delta of the honest mean."""
    hostile = data.draw(st.integers(1, honest - 1))
    rng = np.random.default_rng(seed)
    vectors = several(rng, honest, 300, spread=0.1)
    mean = np.mean(vectors, axis=0)
    direction = -mean / np.linalg.norm(mean)
    giants = []
    for _ in range(hostile):
        if not alike:
            direction = rng.normal(0, 1, 300)
        giant = direction / np.linalg.norm(direction) * np.linalg.norm(mean) * length
        giants.append(np.clip(giant, 1 - VALUE_LIMIT, VALUE_LIMIT - 1))
    merged = centered_clip(deltas([*vectors, *giants]))
    longest = max(np.linalg.norm(v) for v in vectors)
    assert np.linalg.norm(merged - mean) <= 1.5 * longest
    assert norm(merged) <= 1.1 * longest


def test_a_long_window_is_no_attack_to_centered_clip(rng):
    """100 times the steps after a random walk: 10 times the length, and it counts in full."""
    vectors = [rng.normal(0, 1000, 2000) for _ in range(4)]
    long = rng.normal(0, 10_000, 2000)
    merged = centered_clip(deltas([*vectors, long], steps=[1, 1, 1, 1, 100]))
    blamed = centered_clip(deltas([*vectors, long], steps=[1] * 5))
    along = long / np.linalg.norm(long)
    assert merged @ along > 0.9 * np.linalg.norm(long) / 5
    assert blamed @ along < 0.3 * np.linalg.norm(long) / 5


def test_centered_clip_bits_are_fixed():
    """A change here splits every swarm that uses it."""
    digest = sha256()
    at = np.arange(1000, dtype=np.int64)
    for count in (1, 2, 3, 5, 8):
        vectors = []
        for number in range(count):
            values = (at * 2654435761 * (number + 3)) % (1 << (12 + number))
            vectors.append(values - (1 << (11 + number)))
        weights = [100.0 + 37 * number for number in range(count)]
        steps = [3 + number for number in range(count)]
        digest.update(centered_clip(deltas(vectors, weights, steps)).astype("<i4").tobytes())
    assert digest.hexdigest()[:16] == "2bb6267c0be12507"


# --- rda where directions cancel


@given(SEEDS, st.integers(1, 5000), st.integers(1, 1000))
def test_exactly_opposite_deltas_give_next_to_no_step(seed, numel, ratio):
    """Whatever their lengths: what the rounding of coefficients leaves is not made a step of full length."""
    values = np.random.default_rng(seed).normal(0, 1e5, numel).astype(np.int32)
    pair = deltas([values, -values * ratio])
    assert norm(radial_directional(pair)) <= sqrt(numel) + 1e-3 * max(pair.norms)


@pytest.mark.parametrize("codec", ["int8", "int4", "int2"])
def test_what_a_codec_leaves_of_opposite_deltas_is_shortened(codec, rng):
    values = rng.normal(0, 1e5, 4096).astype(np.int32)
    fragment = builders.one_tensor(4096, "rda")
    pair = [
        Payload(codec, fragment, encode_payload(codec, fragment, [v])).tensor(0)
        for v in (values, -values + 7)
    ]
    both = deltas(pair)
    residue = np.linalg.norm(pair[0].astype(float) / both.norms[0] + pair[1].astype(float) / both.norms[1])
    length = (both.norms[0] + both.norms[1]) / 2
    assert norm(radial_directional(both)) == pytest.approx(
        length * residue / (RESULTANT_MIN * sqrt(2)), rel=0.01, abs=64
    )


def test_the_step_falls_to_nothing_continuously(rng):
    """From orthogonal to opposite: whole until a cosine of -0.75, then shorter and shorter."""
    first, second = rng.normal(0, 1, (2, 10_000))
    second -= first * (first @ second) / (first @ first)
    first, second = (v / np.linalg.norm(v) * 1e6 for v in (first, second))
    lengths = []
    for cosine in (0.0, -0.5, -0.74, -0.8, -0.9, -0.99, -0.9999, -1.0):
        other = cosine * first + sqrt(1 - cosine * cosine) * second
        lengths.append(norm(radial_directional(deltas([first, other]))) / 1e6)
        expected = min(1.0, sqrt(1 + cosine) / RESULTANT_MIN)
        assert lengths[-1] == pytest.approx(expected, abs=2e-3)
    assert lengths[-1] < 1e-3


@pytest.mark.parametrize("count", [2, 8, 64, 512])
def test_independent_deltas_keep_their_full_length(count, rng):
    """However many: the sum of their directions is short against their number, and not noise."""
    vectors = [rng.normal(0, 1e4, 2000) for _ in range(count)]
    several_ = deltas(vectors)
    assert norm(radial_directional(several_)) == pytest.approx(np.mean(several_.norms), rel=0.01)


def test_shrinking_believes_the_shorter_of_two_and_counts_each_once():
    def shrink(times: float, lengths: list[float], root_steps: list[float]) -> list[float]:
        return shrink_to(times * usual_rate(lengths, root_steps), lengths, root_steps)

    assert shrink(1.0, [1e9], [1.0]) == [1.0]
    assert shrink(1.0, [1.0, 4.0], [1.0, 1.0]) == [1.0, 0.25]
    assert shrink(1.0, [0.0, 4.0], [1.0, 1.0]) == [1.0, 1.0]
    assert shrink(1.0, [1.0, 2.0, 4.0, 4.0], [1.0] * 4) == [1.0, 1.0, 0.5, 0.5]
    assert shrink(3.0, [1.0, 1.0, 30.0], [1.0, 1.0, 1.0]) == [1.0, 1.0, 0.1]
    assert shrink(1.0, [0.0, 0.0, 5.0], [1.0, 1.0, 1.0]) == [1.0, 1.0, 1.0]
    assert shrink(1.0, [0.0, 0.0, 5.0, 0.0, 1.0, 10.0], [1.0] * 6) == [1.0, 1.0, 1.0, 1.0, 1.0, 0.5]
    assert shrink(1.0, [1.0, 1.0, 10.0], [1.0, 1.0, 10.0]) == [1.0, 1.0, 1.0]


@given(seed=SEEDS, members=st.integers(1, 9), tensors=st.integers(1, 5))
def test_whole_deltas_bound_nothing_where_all_train_everything(seed, members, tensors):
    rng = np.random.default_rng(seed)
    norms = (rng.uniform(1, 2, (members, tensors)) * 10.0 ** rng.integers(0, 9, (members, tensors))).tolist()
    root_steps = np.sqrt(rng.integers(1, 100, members)).tolist()
    sizes = rng.integers(1, 10_000, tensors).tolist()
    alone = [usual_rate(lengths, root_steps) for lengths in zip(*norms, strict=True)]
    assert usual_rates(norms, sizes, root_steps) == alone


def test_what_is_usual_where_few_train_is_bounded_by_whole_deltas():
    """These as long as they would be if all of the fragment changed as much as what does."""
    one, two, three = [3.0, 0.0, 0.0], [3.0, 4.0, 0.0], [30.0, 0.0, 0.0]
    assert usual_rates([one], [1, 2, 1], [1.0]) == [inf] * 3
    assert usual_rates([one, two, three], [1, 2, 1], [1.0] * 3) == [3.0, 6.0, 6.0]
    assert usual_rates([one, [0.0] * 3], [1, 2, 1], [1.0] * 2) == [inf] * 3, "the other one is idle"
    assert usual_rates([], [1, 2, 1], []) == [inf] * 3
