"""How far values and steps reach: finds what fixed point cannot hold before anything is published."""

from collections.abc import Iterable
from math import isnan
from typing import NamedTuple

from torch import Tensor

from gossamer.node.training.fragmentstate import FragmentState, Part
from gossamer.protocol.errors import DivergedError
from gossamer.protocol.fixedpoint import ONE, VALUE_LIMIT

MOVED = "is not finite or moved by over 64: lower the learning rate"
BEYOND = (
    "is not finite or beyond 64, the limit of a swarm's numbers: lower the learning rate, or rescale"
    " what it learns (the targets, say)"
)


class Seen(NamedTuple):
    """A part's values, and the largest magnitude among them, in units of fixed point."""

    values: Tensor
    reach: float


def check_values(state: FragmentState) -> list[Seen]:
    """What each part of a fragment holds. Raises DivergedError if a value is not finite or beyond fixed
    point."""
    found = []
    for part in state.parts:
        values = part.values()
        reach = ONE * largest(magnitude(values[piece.span]) for piece in part.pieces)
        if not reach < VALUE_LIMIT:
            raise _diverged(state, part, values.float() * ONE, BEYOND)
        found.append(Seen(values, reach))
    return found


def check_length(state: FragmentState, part: Part, step: Tensor) -> float:
    """The largest magnitude in a step. Raises DivergedError if fixed point cannot hold it."""
    longest = magnitude(step)
    if not longest < VALUE_LIMIT:
        clear(state.momentum)
        raise _diverged(state, part, step, MOVED)
    return longest


def check_end(state: FragmentState, part: Part, end: Tensor) -> None:
    """Raise DivergedError if a step ends where no healthy Phi is: it would be the end of the swarm's, too."""
    if not magnitude(end) < VALUE_LIMIT:
        clear(state.momentum)
        raise _diverged(state, part, end, BEYOND)


def magnitude(step: Tensor) -> float:
    """The largest magnitude in a tensor; NaN if any is NaN. Two reductions are faster than `aminmax`."""
    if not step.numel():  # a script has emptied a parameter, which `Binding.check` reports
        return 0.0
    return max(-float(step.amin()), float(step.amax()))


def largest(numbers: Iterable[float]) -> float:
    """The largest of some numbers; NaN if any is NaN."""
    return max(numbers, key=lambda number: (isnan(number), number), default=0.0)


def clear(tensors: list[Tensor]) -> None:
    """Set tensors to zero. A value that is not finite would stay so, and a script that puts sound parameters
    back could not publish again."""
    for tensor in tensors:
        tensor.zero_()


def _diverged(state: FragmentState, part: Part, step: Tensor, what: str) -> DivergedError:
    """The error that says `what` happened to the first tensor whose step or values (in units of fixed point)
    are out of range."""
    numels = [step.numel()] if part.bucket is None else part.bucket.numels
    steps = zip(part.places, step.split(numels), strict=True)
    place = next(place for place, one in steps if not magnitude(one) < VALUE_LIMIT)
    name = state.fragment.slots[place].spec.name
    return DivergedError(f"tensor {name!r} {what}")
