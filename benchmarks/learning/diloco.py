"""DiLoCo (arXiv 2311.08105): synchronous windows, fp32, Nesterov momentum on the mean pseudo-gradient."""

from collections.abc import Iterator

import torch

from benchmarks.learning.world import Point, World, mean_of, ring_bytes


def train(world: World, *, lr: float = 0.7, momentum: float = 0.9) -> Iterator[Point]:
    """The defaults are the paper's. No worker is late or dies: all wait for all."""
    workers = world.workers()
    outer = [tensor.detach().clone() for tensor in workers[0].tensors]
    nesterov = torch.optim.SGD(outer, lr=lr, momentum=momentum, nesterov=momentum > 0)
    sent = 0.0
    while True:
        if world.is_due() or world.is_over:
            yield world.point(outer, sent, ring_bytes(sent, len(workers)))
        if world.is_over:
            return
        world.window(workers)
        with torch.no_grad():
            for reference, mean in zip(outer, mean_of(workers), strict=True):
                reference.grad = reference - mean
            nesterov.step()
            for worker in workers:
                for live, reference in zip(worker.tensors, outer, strict=True):
                    live.copy_(reference)
        sent += 4 * world.parameters
