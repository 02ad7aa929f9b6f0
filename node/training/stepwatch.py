"""Whether the inner optimizers have finished the steps that they have begun.

A state torn by an error in the middle of a step has momenta without the variances that go with them or, in
the first step, half of what each parameter needs. No later process could train with it.
"""

from collections.abc import Sequence
from contextlib import suppress

import torch


class StepWatch:
    """Sees the optimizers' steps begin and end, by torch's hooks. A post hook runs only after a whole
    step."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._under_way = 0
        """How many steps have begun and not ended. They nest if a step calls that of its base class."""
        self._seen: set[int] = set()
        """The optimizers that have finished a step, by id."""
        self._is_compiled = False
        """Whether a step was compiled: its hooks then run after it, even if it has failed."""
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for optimizer in optimizers:
            with suppress(AttributeError):  # its constructor skipped torch's: its steps are not seen
                self._handles.append(optimizer.register_step_pre_hook(self._begins))
                self._handles.append(optimizer.register_step_post_hook(self._ends))

    @property
    def is_whole(self) -> bool:
        """Whether all states are known to come from whole steps."""
        are_seen = all(id(one) in self._seen or not one.state for one in self._optimizers)
        return are_seen and not self._under_way and not self._is_compiled

    @property
    def is_torn(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._under_way > 0

    def begin_anew(self) -> None:
        """The loop is between two steps. If it left one in the middle before, it has accepted that state."""
        self._under_way = 0

    def end(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def _begins(self, *_: object) -> None:
        self._is_compiled = self._is_compiled or torch.compiler.is_compiling()
        self._under_way += 1

    def _ends(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._under_way = max(0, self._under_way - 1)  # `begin_anew` may have come within the step
        self._seen.add(id(optimizer))
