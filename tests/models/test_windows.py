"""Which windows a node draws: its own order, every segment once an epoch, any batch reachable at once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossamer.models.task import DataStream
from gossamer.models.text import SEGMENT_BYTES, Window, held_out_windows, training_windows


def counting(size: int) -> np.ndarray:
    """Text whose bytes tell where they stand: no two windows of it are alike."""
    return np.frombuffer(b"".join(i.to_bytes(4, "big") for i in range(-(-size // 4))), np.uint8)[:size]


def draw(
    text: np.ndarray, node: bytes, skip: int = 0, batch_size: int = 4, context: int = 8
) -> Iterator[Window]:
    stream = DataStream(seed=1, node_id=node, skip_batches=skip)
    return training_windows(text, batch_size=batch_size, context=context, stream=stream)


def stack(windows: Iterator[Window], count: int) -> torch.Tensor:
    return torch.cat([inputs for inputs, _ in itertools.islice(windows, count)])


def test_targets_are_the_inputs_one_ahead() -> None:
    inputs_BL, targets_BL = next(draw(counting(30_000), b"a"))
    assert inputs_BL.shape == targets_BL.shape == (4, 8)
    assert inputs_BL.dtype == targets_BL.dtype == torch.int64
    assert inputs_BL.is_contiguous() and targets_BL.is_contiguous()
    assert torch.equal(inputs_BL[:, 1:], targets_BL[:, :-1])


def test_same_stream_same_batches_other_node_others() -> None:
    text = counting(100_000)
    assert torch.equal(stack(draw(text, b"a"), 20), stack(draw(text, b"a"), 20))
    same_rows = (stack(draw(text, b"a"), 20) == stack(draw(text, b"b"), 20)).all(1)
    assert same_rows.float().mean() < 0.1


@given(skip=st.integers(0, 40))
def test_a_stream_can_begin_anywhere(skip: int) -> None:
    text = counting(60_000)  # 15 segments: 3 batches an epoch
    assert torch.equal(stack(draw(text, b"a", skip), 5), stack(draw(text, b"a"), skip + 5)[4 * skip :])


def test_every_segment_is_visited_once_an_epoch_and_orders_differ() -> None:
    segments = 16
    text = np.repeat(np.arange(segments, dtype=np.uint8), SEGMENT_BYTES)
    windows = draw(text, b"a")
    # A window may end in the next segment; its first byte never lies there.
    orders = [stack(windows, segments // 4)[:, 0].tolist() for _ in range(3)]
    assert all(sorted(order) == list(range(segments)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("size", [9, 10, 40, 5000])
def test_short_texts_give_full_batches(size: int) -> None:
    text = counting(size)
    rows = stack(draw(text, b"a", batch_size=16), 50)
    assert rows.shape == (800, 8)
    assert rows.max() <= 255


def test_the_ends_of_the_text_are_drawn_too() -> None:
    text = np.zeros(300, dtype=np.uint8)
    text[0], text[-1] = 1, 2
    batches = list(itertools.islice(draw(text, b"a"), 1000))
    assert any((inputs == 1).any() for inputs, _ in batches)
    assert any((targets == 2).any() for _, targets in batches)


def test_held_out_windows_are_fixed_and_evenly_spaced() -> None:
    text = np.arange(200, dtype=np.uint8)
    batches = list(held_out_windows(text, batch_size=4, context=10, batches=3))
    starts = torch.cat([inputs[:, 0] for inputs, _ in batches]).tolist()
    assert starts[0] == 0 and starts[-1] == 189
    assert set(np.diff(starts)) <= {17, 18}
    assert len(starts) == 12


def test_a_short_held_out_part_gives_each_window_once() -> None:
    batches = list(held_out_windows(np.arange(14, dtype=np.uint8), batch_size=3, context=10, batches=9))
    assert [len(inputs) for inputs, _ in batches] == [3, 1]
    assert torch.cat([inputs[:, 0] for inputs, _ in batches]).tolist() == [0, 1, 2, 3]
