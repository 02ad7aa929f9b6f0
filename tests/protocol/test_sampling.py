"""`gossamer.protocol.sampling`: what random choices and orders promise, whatever the seed."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol.sampling import sample, shuffle


@given(st.sets(st.integers(0, 100), max_size=20), st.integers(0, 25), st.integers(0, 1000))
def test_a_sample_goes_by_what_there_is_and_not_by_its_order(items, count, seed):
    chosen = sample(items, count, random.Random(seed))
    assert len(chosen) == len(set(chosen)) == min(count, len(items))
    assert set(chosen) <= items
    assert chosen == sample(sorted(items, reverse=True), count, random.Random(seed))


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(0, 1000))
def test_a_shuffle_keeps_all_and_repeats_with_its_seed(items, seed):
    first, second = list(items), list(items)
    shuffle(first, random.Random(seed))
    shuffle(second, random.Random(seed))
    assert first == second
    assert sorted(first) == sorted(items)
