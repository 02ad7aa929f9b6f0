"""Timing one call, and the memory copy that everything is compared with."""

import time
from collections.abc import Callable

import numpy as np

from gossamer.protocol.fixedpoint import Ints


def best_of(call: Callable[[], object], repeats: int, clock: Callable[[], float] = time.thread_time) -> float:
    """Seconds of the fastest of several calls: the one that the machine disturbed least.

    They are this thread's processor time, so that waiting for a core does not count.
    """
    times = []
    for _ in range(repeats):
        begun = clock()
        call()
        times.append(clock() - begun)
    return min(times)


def copy_seconds(values: Ints, repeats: int) -> float:
    """Seconds to copy the values once into memory that is already there."""
    target = np.empty_like(values)
    return best_of(lambda: np.copyto(target, values), repeats)


def delta_like(numel: int, seed: int = 0) -> Ints:
    """Values as a window of training leaves them: bell-shaped, a few of them large; int32[numel]."""
    rng = np.random.default_rng(seed)
    values = rng.standard_t(4, numel) * 2.0**14
    return np.clip(values, -(2**29), 2**29).astype(np.int32)
