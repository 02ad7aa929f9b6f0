"""Data-parallel AdamW: gradients averaged over all workers' batches at every step."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.learning.world import Averaged, Point, World, ring_bytes
from gossamer.protocol.fixedpoint import Ints, to_fixed, to_float


def train(world: World) -> Iterator[Point]:
    """One model on all workers' batches at once, which is the same as averaging their gradients."""
    count = world.scale.workers
    first, *others = world.workers()
    averaged, steps = Averaged(_fixed(first.tensors)), 0
    while True:
        if world.is_due() or world.is_over:
            gradients = 4.0 * world.parameters * steps
            means = _like(first.tensors, averaged.mean())
            yield world.point(first.tensors, gradients, ring_bytes(gradients, count), means)
        if world.is_over:
            return
        world.step(first, *(next(worker.batches) for worker in others))
        steps += 1
        if steps % world.scale.steps == 0:
            averaged.add(steps // world.scale.steps, _fixed(first.tensors))


def _fixed(tensors: Sequence[Tensor]) -> Ints:
    """All values in fixed point, int32[n]."""
    return to_fixed(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).numpy())


def _like(tensors: Sequence[Tensor], values: Ints) -> list[Tensor]:
    """Values in fixed point as tensors of these shapes."""
    parts = torch.from_numpy(to_float(values)).split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
