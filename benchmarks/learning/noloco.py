"""NoLoCo (arXiv 2506.10911): synchronous windows, fp32, random pairs instead of everybody with everybody."""

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.learning.world import Point, World


def train(world: World, *, lr: float = 0.7, momentum: float = 0.5) -> Iterator[Point]:
    """The defaults are the paper's, as is the pull between partners, which is `lr` in its published code.

    The model measured is the mean of all workers' references, which here is never worse than any of them.
    """
    workers = world.workers()
    references = [[tensor.detach().clone() for tensor in worker.tensors] for worker in workers]
    momenta = [[torch.zeros_like(tensor) for tensor in reference] for reference in references]
    random = np.random.default_rng((world.seed, 7))
    sent = 0.0
    while True:
        if world.is_due() or world.is_over:
            means = [torch.stack(same).mean(0) for same in zip(*references, strict=True)]
            yield world.point(means, sent, sent)
        if world.is_over:
            return
        world.window(workers)
        with torch.no_grad():
            for pair in random.permutation(len(workers)).reshape(-1, 2):
                for index in range(len(references[0])):
                    progress = sum(workers[i].tensors[index] - references[i][index] for i in pair) / 2
                    middle = sum(references[i][index] for i in pair) / 2
                    for i in pair:
                        pull = middle - references[i][index]
                        momenta[i][index].mul_(momentum).add_(progress + pull, alpha=lr)
                        references[i][index].add_(momenta[i][index])
                        workers[i].tensors[index].copy_(references[i][index])
        sent += 2 * 4 * world.parameters  # the reference and the progress
