"""Whether the inner optimizers have ended the steps that they have begun.

A state that an error has torn in the middle of one has momenta without the variances that go with them, or,
from the first step, half of what each parameter needs: with that no later process could train.
"""

from collections.abc import Sequence
from contextlib import suppress

import torch


class StepWatch:
    """Sees the optimizers' steps begin and end, by torch's hooks: those of the end come after whole steps."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._under_way = 0
        """Steps; an optimizer's may go through that of the class which it extends."""
        self._seen: set[int] = set()
        """The optimizers that have ended a step, by id."""
        self._is_compiled = False
        """Whether a step was compiled: its hooks run after it then, also where it has failed."""
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for optimizer in optimizers:
            with suppress(AttributeError):  # one that was not made as torch's are: its steps are not seen
                self._handles.append(optimizer.register_step_pre_hook(self._begins))
                self._handles.append(optimizer.register_step_post_hook(self._ends))

    @property
    def is_whole(self) -> bool:
        """Whether all states are known to be those of whole steps."""
        are_seen = all(id(one) in self._seen or not one.state for one in self._optimizers)
        return are_seen and not self._under_way and not self._is_compiled

    @property
    def is_torn(self) -> bool:
        """Whether a step was begun and is known not to have ended."""
        return self._under_way > 0

    def begin_anew(self) -> None:
        """The loop is between two steps: one that was left in the middle before is what it goes on from."""
        self._under_way = 0

    def end(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()

    def _begins(self, *_: object) -> None:
        self._is_compiled = self._is_compiled or torch.compiler.is_compiling()
        self._under_way += 1

    def _ends(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._under_way = max(0, self._under_way - 1)  # the loop may have gone on from within it
        self._seen.add(id(optimizer))
