"""Learning-rate schedules by the swarm's tokens.

A schedule maps the tokens that the whole swarm has trained on to a factor on the peak learning rate. It does
not depend on a node's own steps, so a newcomer is at the right place at once, and all nodes slow down
together.
"""

import math
from collections.abc import Callable

from gossamer.protocol.errors import ConfigError

Schedule = Callable[[int], float]
"""Tokens that the swarm has trained on so far -> factor. `Task.lr_scale` of the built-in tasks is one."""


def constant(*, warm_up_tokens: int = 0) -> Schedule:
    """1, after a linear warm-up from nearly 0. Raises ConfigError."""
    return _warmed_up(warm_up_tokens, lambda tokens: 1.0)


def linear(total_tokens: int, *, warm_up_tokens: int = 0, floor: float = 0.0) -> Schedule:
    """Warm-up, then a straight line to `floor` at `total_tokens`, where it stays. Raises ConfigError."""
    return _falling(total_tokens, warm_up_tokens, floor, lambda part: 1.0 - part)


def cosine(total_tokens: int, *, warm_up_tokens: int = 0, floor: float = 0.1) -> Schedule:
    """Warm-up, then half a cosine to `floor` at `total_tokens` (arXiv 1608.03983). Raises ConfigError."""
    return _falling(total_tokens, warm_up_tokens, floor, lambda part: (1.0 + math.cos(math.pi * part)) / 2)


def _falling(total: int, warm_up: int, floor: float, shape: Callable[[float], float]) -> Schedule:
    if not total > warm_up:
        raise ConfigError(f"total_tokens is {total}: it must be more than warm_up_tokens, {warm_up}")
    if not 0 <= floor <= 1:
        raise ConfigError(f"floor is {floor}: it is a part of the peak learning rate, 0 to 1")

    def scale(tokens: int) -> float:
        part = min(1.0, (tokens - warm_up) / (total - warm_up))
        return floor + (1.0 - floor) * shape(part)

    return _warmed_up(warm_up, scale)


def _warmed_up(warm_up: int, after: Schedule) -> Schedule:
    if warm_up < 0:
        raise ConfigError(f"warm_up_tokens is {warm_up}: it cannot be negative")
    # Starts a little above 0: with steps of 0 there would never be tokens to warm up with.
    return lambda tokens: max(0.01, tokens / warm_up) if tokens < warm_up else after(tokens)
