"""The layout: every value in one place, the same place on every node."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gossamer.protocol.payloads import TensorSpec, plan

SHAPES = st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=30)


@given(SHAPES, st.data())
def test_every_value_has_exactly_one_place(shapes, data):
    tensors = [TensorSpec(f"t{i}", shape, "mean") for i, shape in enumerate(shapes)]
    fragments = data.draw(st.integers(1, len(tensors)))
    layout = plan(tensors, fragments)
    assert len(layout.fragments) == fragments
    assert layout.numel == sum(t.numel for t in tensors)
    assert layout.snapshot_bytes == 4 * layout.numel
    at = 0
    names = []
    spans = []
    for number, fragment in enumerate(layout.fragments):
        assert (fragment.index, fragment.offset) == (number, at)
        at += fragment.numel
        inside = 0
        for slot in fragment.slots:
            assert (slot.offset, slot.span) == (inside, slice(inside, inside + slot.numel))
            assert slot.numel == slot.spec.numel
            spans.append((slot.spec, slice(fragment.offset + inside, fragment.offset + inside + slot.numel)))
            inside += slot.numel
        assert inside == fragment.numel
        order = [int(slot.spec.name[1:]) for slot in fragment.slots]
        assert order == sorted(order), "tensors keep the manifest's order within a fragment"
        names += [slot.spec.name for slot in fragment.slots]
    assert sorted(names) == sorted(t.name for t in tensors)
    assert list(layout.tensors()) == spans
    assert plan(tensors, fragments) == layout


@given(SHAPES, st.data())
def test_fragments_are_balanced_and_none_is_empty(shapes, data):
    tensors = [TensorSpec(f"t{i}", shape, "mean") for i, shape in enumerate(shapes)]
    fragments = data.draw(st.integers(1, len(tensors)))
    sizes = [fragment.numel for fragment in plan(tensors, fragments).fragments]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= max(t.numel for t in tensors)


def test_a_known_plan():
    """Largest first into the lightest. A change here changes what every round means."""
    tensors = [TensorSpec(n, (s,), "mean") for n, s in [("a", 5), ("b", 9), ("c", 5), ("d", 2), ("e", 9)]]
    assert [[s.spec.name for s in f.slots] for f in plan(tensors, 2).fragments] == [
        ["a", "b", "d"],
        ["c", "e"],
    ]
