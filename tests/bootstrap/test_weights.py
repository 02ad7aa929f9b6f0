"""`gossamer.bootstrap.manifests`: existing weights become a swarm's first parameters, or are told why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gossamer.bootstrap.manifests import INDEX, SINGLE, load_weights
from gossamer.protocol.errors import ConfigError


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)


class Model(nn.Module):
    """A head tied to the embedding, buffers, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.inner.embed.weight
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)


def trained() -> Model:
    """Not as it begins."""
    torch.manual_seed(1)
    model = Model()
    with torch.no_grad():
        for parameter in model.inner.parameters():
            parameter.normal_()
    return model


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def fresh() -> Model:
    """The same frozen part as `trained`, and the rest as it begins."""
    torch.manual_seed(2)
    model = Model()
    model.frozen.load_state_dict(trained().frozen.state_dict())
    return model


def load(tensors: dict[str, Tensor], folder: Path) -> Model:
    save_file(tensors, folder / "w.safetensors")
    model = fresh()
    load_weights(model, folder / "w.safetensors")
    return model


def assert_loaded(model: Model) -> None:
    for name, parameter in trained().named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name


@pytest.mark.parametrize("left_out", ["head.weight", "inner.embed.weight", "nothing"])
def test_a_tied_tensor_goes_by_any_of_its_names(tmp_path: Path, left_out: str) -> None:
    tensors = state(trained())
    tensors.pop(left_out, None)
    assert_loaded(load(tensors, tmp_path))


def test_buffers_are_passed_over(tmp_path: Path) -> None:
    tensors = state(trained())
    tensors["inner.norm.running_mean"] += 7
    assert torch.equal(load(tensors, tmp_path).inner.norm.running_mean, torch.zeros(3))
    tensors = {name: tensor for name, tensor in tensors.items() if "running" not in name}
    assert_loaded(load(tensors, tmp_path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_floats_are_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {
        n: t.to(dtype) for n, t in state(trained()).items() if "frozen" not in n and t.is_floating_point()
    }
    model = load(tensors, tmp_path)
    assert model.head.weight.dtype == torch.float32
    assert torch.equal(model.head.weight, tensors["head.weight"].float())


def test_a_base_models_file_fits_the_whole_model(tmp_path: Path) -> None:
    tensors = {
        name.removeprefix("inner."): tensor
        for name, tensor in state(trained()).items()
        if name.startswith("inner.")
    }
    assert_loaded(load(tensors, tmp_path))


def test_a_folder_with_one_file_or_with_shards(tmp_path: Path) -> None:
    tensors = state(trained())
    save_file(tensors, tmp_path / SINGLE)
    model = fresh()
    load_weights(model, tmp_path)
    assert_loaded(model)
    (tmp_path / SINGLE).unlink()
    halves = {"1.safetensors": sorted(tensors)[::2], "2.safetensors": sorted(tensors)[1::2]}
    for file, names in halves.items():
        save_file({name: tensors[name] for name in names}, tmp_path / file)
    listed = {name: file for file, names in halves.items() for name in names}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    for path in (tmp_path, tmp_path / INDEX):
        model = fresh()
        load_weights(model, path)
        assert_loaded(model)
    (tmp_path / "2.safetensors").unlink()
    with pytest.raises(ConfigError, match="cannot read weights from"):
        load_weights(fresh(), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"inner.norm.weight": None, "inner.norm.wait": torch.zeros(3)},
            "has no tensor 'inner.norm.weight' of shape [3], which the model trains; the most similar name is"
            " 'inner.norm.wait'",
        ),
        ({"other": torch.zeros(2)}, "has a tensor 'other', which the model does not have"),
        ({"inner.norm.bias": torch.zeros(4)}, "'inner.norm.bias' has shape [4], but [3] in the model"),
        (
            {"inner.norm.bias": torch.zeros(3, dtype=torch.int8)},
            "'inner.norm.bias' is torch.int8, not floating-point: is the model quantised?",
        ),
        ({"head.weight": torch.zeros(5, 3)}, "tied to another tensor of the file"),
        (
            {"frozen.weight": torch.zeros(2, 2)},
            "'frozen.weight' differs from the model's: it is frozen there",
        ),
    ],
)
def test_what_does_not_fit(tmp_path: Path, change: dict[str, Tensor | None], message: str) -> None:
    tensors = {n: t for n, t in {**state(trained()), **change}.items() if t is not None}
    with pytest.raises(ConfigError) as caught:
        load(tensors, tmp_path)
    assert message in str(caught.value) and "w.safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.safetensors", None, "missing.safetensors: no such file or folder"),
        ("", None, f"{SINGLE}: no such file or folder"),
        ("model.bin", b"x", "only safetensors files are read"),
        ("bad.safetensors", b"this is none", "cannot read weights from"),
        ("empty.safetensors", b"", "cannot read weights from"),
        ("bad.index.json", b"[1, 2", "cannot read weights from"),
        ("list.index.json", b"[]", "cannot read weights from"),
        ("odd.index.json", b'{"weight_map": {"x": 3}}', "cannot read weights from"),
        ("gone.index.json", b'{"weight_map": {"x": "gone.safetensors"}}', "cannot read weights from"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_weights(fresh(), tmp_path / name)
    assert message in str(caught.value) and "\n" not in str(caught.value)
