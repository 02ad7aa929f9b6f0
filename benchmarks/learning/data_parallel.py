"""Data-parallel AdamW: gradients averaged over all workers' batches at every step."""

from collections.abc import Iterator

from benchmarks.learning.world import Point, World, ring_bytes


def train(world: World) -> Iterator[Point]:
    """One model on all workers' batches at once, which is the same as averaging their gradients."""
    count = world.scale.workers
    first, *others = world.workers()
    gradients = 0.0
    while True:
        if world.is_due() or world.is_over:
            yield world.point(first.tensors, gradients, ring_bytes(gradients, count))
        if world.is_over:
            return
        world.step(first, *(next(worker.batches) for worker in others))
        gradients += 4 * world.parameters
