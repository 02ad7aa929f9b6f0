"""What fixed point cannot hold of a model's first parameters is refused or warned of."""

import pytest
import torch
from torch import nn

from gossamer.bootstrap import manifests
from gossamer.protocol.errors import ConfigError


def model_with(values):
    model = nn.ParameterDict({"scale": torch.ones(4), "epsilon": torch.tensor(values)})
    return model, lambda: manifests.describe(model, name="s", every_steps=5)


@pytest.mark.parametrize("value", [64.0, -1e4, float("nan"), float("inf")])
def test_a_value_out_of_range_is_refused(value):
    _, describe = model_with([1.0, value])
    with pytest.raises(ConfigError, match="tensor 'epsilon': a value is not finite or outside"):
        describe()


def test_values_that_vanish_are_one_warning(caplog):
    model, describe = model_with([1e-8, 1.0, 0.0])
    model["other"] = nn.Parameter(torch.full((2,), 2e-9))
    describe()
    (line,) = caplog.messages
    assert "1 of 3 values of 'epsilon', 2 of 2 values of 'other'" in line


def test_a_few_of_many_small_values_are_no_warning(caplog):
    _, describe = model_with([1.0] * 2000 + [1e-8])
    describe()
    assert not caplog.messages
