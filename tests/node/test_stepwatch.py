"""Whether the inner optimizers' states are those of whole steps."""

import pytest
import torch
from torch import nn

from gossamer.node.trainer.watchdogs import StepWatch


class Extended(torch.optim.AdamW):
    """Goes through AdamW's step, whose end is not the end of its own."""

    def step(self, closure=None):
        super().step(closure)
        if closure is not None:
            raise MemoryError


def trained(kind=torch.optim.AdamW):
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return kind([parameter])


def fails():
    raise MemoryError


@pytest.mark.parametrize(("kind", "torn_by"), [(torch.optim.AdamW, fails), (Extended, lambda: 1.0)])
def test_a_step_that_fails_is_half_done_until_the_loop_goes_on(kind, torn_by):
    trained(torch.optim.AdamW)  # from which on torch calls hooks around the step of that class
    optimizers = [trained(kind), trained()]
    watch = StepWatch(optimizers)
    assert watch.is_whole
    for optimizer in optimizers:
        optimizer.step()
    assert watch.is_whole
    with pytest.raises(MemoryError):
        optimizers[0].step(torn_by)
    assert not watch.is_whole and watch.is_torn
    optimizers[1].step()
    assert not watch.is_whole and watch.is_torn
    watch.begin_anew()
    assert watch.is_whole and not watch.is_torn


def test_it_is_not_known_while_one_is_under_way():
    optimizer, found = trained(), []
    watch = StepWatch([optimizer])
    optimizer.step(lambda: found.append(watch.is_whole))
    assert found == [False] and watch.is_whole


def test_nor_of_steps_that_torch_calls_no_hooks_for():
    class ByItself(torch.optim.Optimizer):
        def __init__(self, params):
            self.param_groups, self.state = [{"params": list(params)}], {}

    optimizer, by_itself = trained(), ByItself([nn.Parameter(torch.ones(1))])
    watch = StepWatch([optimizer, by_itself])
    optimizer.step()
    assert watch.is_whole, "the other keeps nothing yet"
    by_itself.state["some"] = torch.ones(1)
    assert not watch.is_whole


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # within torch.compile
@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")
def test_nor_of_compiled_ones():
    """Their hooks run when all is over, also where it has failed."""
    optimizer = trained()
    watch = StepWatch([optimizer])
    torch.compile(optimizer.step, backend="eager")()
    assert optimizer.state and not watch.is_whole and not watch.is_torn


def test_a_loop_that_goes_on_from_within_a_step_hides_no_later_one():
    optimizer = trained()
    watch = StepWatch([optimizer])
    optimizer.step(watch.begin_anew)
    with pytest.raises(MemoryError):
        optimizer.step(fails)
    assert watch.is_torn


def test_it_leaves_no_hooks_behind():
    optimizer = trained()
    watch = StepWatch([optimizer])
    watch.end()
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
