"""Digests of ranges: equal exactly when the sets are, whatever happened on the way."""

from __future__ import annotations

from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol import range_digests as ranges
from gossamer.protocol.limits import ROUND_MAX
from gossamer.protocol.range_digests import EMPTY, FANOUT, LEVEL_MAX, RangeDigests

ROUNDS = st.one_of(st.integers(0, 40), st.integers(0, 5000), st.integers(0, ROUND_MAX))
CONTENT = st.dictionaries(ROUNDS, st.integers(0, 3), max_size=15)


def _digest(value: int) -> bytes:
    return sha256(bytes([value])).digest()


def _built(content: dict[int, int]) -> RangeDigests:
    digests = RangeDigests()
    for round_, value in content.items():
        digests.update(round_, _digest(value))
    return digests


@given(CONTENT, st.randoms(use_true_random=False))
def test_order_and_detours_do_not_matter(content, rng):
    expected = _built(content)
    order = list(content.items())
    rng.shuffle(order)
    other = RangeDigests()
    for round_, value in order:
        other.update(round_, _digest(7))
        if rng.random() < 0.5:
            _ = other.root, other.summary()  # caches something that must be forgotten
        detour = rng.randrange(ROUND_MAX)
        if detour not in content:
            other.update(detour, _digest(9))
            _ = other.root
            other.update(detour, EMPTY)
        other.update(round_, _digest(value))
    assert other.root == expected.root
    assert other.top == expected.top
    assert other.summary() == expected.summary()


@given(CONTENT, CONTENT)
def test_roots_are_equal_exactly_when_the_sets_are(one, other):
    assert (_built(one).root == _built(other).root) == (one == other)


@given(CONTENT.filter(bool))
def test_descending_where_it_is_not_empty_finds_every_round(content):
    digests = _built(content)
    found = {}
    todo = [(digests.top, index, digest) for index, digest in digests.summary()]
    while todo:
        level, index, digest = todo.pop()
        assert digest == digests.digest(level, index)
        if digest == EMPTY:
            continue
        if level == 0:
            found[index] = digest
        else:
            todo += [(level - 1, i, d) for i, d in digests.children(level, index)]
    assert found == {round_: _digest(value) for round_, value in content.items()}


def test_a_gap_costs_nothing(monkeypatch):
    """A peer may sign a round as far ahead as plausible: millions of empty rounds must not be walked."""
    hashed = 0
    real = ranges.sha256

    def count(data):
        nonlocal hashed
        hashed += 1
        return real(data)

    calls = 0
    inner = RangeDigests.digest

    def digest(self, level, index):
        nonlocal calls
        calls += 1
        return inner(self, level, index)

    monkeypatch.setattr(ranges, "sha256", count)
    monkeypatch.setattr(RangeDigests, "digest", digest)
    digests = _built({1: 1, ROUND_MAX: 1})
    assert digests.root != EMPTY
    assert hashed <= 2 * (LEVEL_MAX + 1)
    assert calls <= 2 * FANOUT * (LEVEL_MAX + 2)
