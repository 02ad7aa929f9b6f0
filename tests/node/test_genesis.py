"""A model's first parameters: what fixed point cannot hold is refused or warned of; the rest comes back."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gossamer.bootstrap import manifests
from gossamer.node.exports import export
from gossamer.node.exports.generate import load_into
from gossamer.node.trainer import genesis
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.payloads import TensorSpec
from tests.protocol import builders


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


@pytest.mark.parametrize("transposed", [False, True])
def test_a_tensor_in_two_fragments_is_put_together_again(transposed, tmp_path):
    """In the model that `gossamer generate` builds, and in an export."""
    first, second = (nn.ParameterDict({"w": torch.randn(300, 500), "b": torch.randn(7)}) for _ in range(2))
    if transposed:
        first["w"].data = first["w"].data.T.contiguous().T
    tensors = tuple(TensorSpec(name, tuple(values.shape), "mean") for name, values in first.items())
    manifest = builders.manifest(tensors, 2)
    layout = manifest.plan()
    assert any(slot.is_cut for slot in layout.fragments[0].slots)
    phi = genesis.parameters(first, layout)
    load_into(second, manifest, phi)
    export.write(tmp_path / "m.safetensors", layout, phi, "float32", {})
    exported = load_file(tmp_path / "m.safetensors")
    for name, values in first.items():
        assert torch.allclose(second[name], values, rtol=0, atol=1e-7)
        assert torch.equal(second[name], exported[name])
