"""The interface's own promises: streams, names, averaging, and what a task need not implement."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gossamer.models import TaskError
from gossamer.models.task import Batch, DataStream, Task, evaluating, local_tensors, named_tensors


class Regression(Task):
    """As little as a user must write; no text."""

    def build_model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def batches(self, stream: DataStream) -> Iterator[Batch]:
        while True:
            yield torch.ones(2, 3)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(batch).square().mean()

    def tokens(self, batch: Batch) -> int:
        return len(batch)

    def evaluate(self, model: nn.Module) -> float:
        with evaluating(model):
            return float(self.loss(model, torch.zeros(1, 3)))


class Tied(nn.Module):
    """A head tied to its embedding, a projection, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 10, bias=True)
        self.embedding = nn.Embedding(10, 4)
        self.embedding.weight = self.head.weight
        self.projection = nn.Linear(4, 4, bias=False)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("table", torch.ones(3))


def stream(node: bytes = b"node", seed: int = 0) -> DataStream:
    return DataStream(seed=seed, node_id=node)


def test_derived_seed_is_pinned() -> None:
    # Any change here changes what every node draws: it would need a new purpose string, not a new number.
    text = bytes(8) + (4).to_bytes(8, "big") + b"node"
    assert stream().derived_seed() == int(hashlib.sha256(text).hexdigest()[:16], 16) // 2
    assert stream().derived_seed() == 2069451004807217585
    assert stream().derived_seed("order") != stream().derived_seed()


@given(st.integers(0, 2**63 - 1), st.binary(max_size=40))
def test_derived_seed_fits_63_bits_and_depends_on_seed_and_node(seed: int, node: bytes) -> None:
    derived = stream(node, seed).derived_seed()
    assert 0 <= derived < 2**63
    assert derived == DataStream(seed=seed, node_id=node, skip_batches=7).derived_seed()
    assert derived != stream(node + b"\0", seed).derived_seed()
    assert derived != stream(node, (seed + 1) % 2**63).derived_seed()


def test_generators_differ_by_epoch_and_repeat() -> None:
    first, again, later = stream().generator(0), stream().generator(0), stream().generator(1)
    assert (values := first.integers(0, 1 << 40, 4).tolist()) == again.integers(0, 1 << 40, 4).tolist()
    assert values != later.integers(0, 1 << 40, 4).tolist()


@pytest.mark.parametrize(("seed", "skip"), [(-1, 0), (2**63, 0), (0, -1)])
def test_a_stream_refuses_what_is_out_of_range(seed: int, skip: int) -> None:
    with pytest.raises(TaskError, match=r"^(seed|skip_batches) is "):
        DataStream(seed=seed, node_id=b"", skip_batches=skip)


def test_named_tensors_has_trainable_parameters_once_in_order_of_registration() -> None:
    model = Tied()
    assert [name for name, _ in named_tensors(model)] == ["head.weight", "head.bias", "projection.weight"]
    assert named_tensors(model)[0][1] is model.embedding.weight


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")
def test_named_tensors_of_a_scripted_model_are_those_of_the_plain_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    scripted = named_tensors(torch.jit.script(model))
    assert [name for name, _ in scripted] == [name for name, _ in named_tensors(model)]


def test_what_is_local_is_frozen_or_a_buffer_that_is_kept() -> None:
    model = nn.ModuleDict({"net": Tied(), "norm": nn.BatchNorm1d(2)})
    model["net"].register_buffer("frequencies", torch.ones(2), persistent=False)
    model["net"].register_buffer("positions", torch.arange(2))
    expected = ["net.frozen", "net.table", "norm.running_mean", "norm.running_var"]
    assert list(local_tensors(model, ["net.head.weight"])) == expected
    assert list(local_tensors(model, ["net.frozen"])) == expected[1:], "what is frozen for a while is shared"
    model["net"] = torch.compile(model["net"], backend="eager")
    assert list(local_tensors(torch.compile(model, backend="eager"), [])) == expected


def test_named_tensors_drops_the_prefix_of_torch_compile() -> None:
    model = nn.Module()
    model.add_module("_orig_mod", nn.Linear(2, 2))
    assert [name for name, _ in named_tensors(model)] == ["weight", "bias"]


def on_fabric(module: nn.Module) -> nn.Module:
    fabric = pytest.importorskip("lightning.fabric")
    wrapped = fabric.Fabric(accelerator="cpu").setup(module)
    assert isinstance(wrapped, nn.Module)
    return wrapped


def compiled(module: nn.Module) -> nn.Module:
    whole = torch.compile(module, backend="eager")
    assert isinstance(whole, nn.Module)
    return whole


def under(name: str, module: nn.Module) -> nn.Module:
    """As wrappers do that keep the module by this name."""
    wrapper = nn.Module()
    wrapper.add_module(name, module)
    return wrapper


def in_parts(module: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """As a script with several models gives them."""
    return nn.ModuleList([wrap(part) for part in module.children()])


@pytest.mark.parametrize(
    "wrap",
    [
        nn.DataParallel,
        on_fabric,
        lambda module: on_fabric(compiled(module)),
        lambda module: compiled(on_fabric(module)),
        lambda module: nn.DataParallel(compiled(module)),
        lambda module: in_parts(module, on_fabric),
        lambda module: in_parts(module, compiled),
        lambda module: in_parts(module, lambda part: on_fabric(compiled(part))),
        lambda module: in_parts(module, nn.DataParallel),
        lambda module: compiled(in_parts(module, lambda part: nn.DataParallel(compiled(part)))),
        lambda module: in_parts(module, lambda part: compiled(nn.DataParallel(part))),
        lambda module: in_parts(module, lambda part: under("_fsdp_wrapped_module", compiled(part))),
        lambda module: compiled(under("_checkpoint_wrapped_module", nn.DataParallel(module))),
    ],
)
def test_a_wrapped_model_has_the_names_of_the_plain_one(wrap: Callable[[nn.Module], nn.Module]) -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    wrapped = wrap(plain)
    assert [name for name, _ in named_tensors(wrapped)] == [name for name, _ in named_tensors(plain)]
    assert list(local_tensors(wrapped, [])) == list(local_tensors(plain, []))


def test_a_distributed_model_has_the_names_of_the_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        ddp = nn.parallel.DistributedDataParallel
        test_a_wrapped_model_has_the_names_of_the_plain_one(ddp)
        test_a_wrapped_model_has_the_names_of_the_plain_one(lambda module: in_parts(module, ddp))
    finally:
        torch.distributed.destroy_process_group()


def test_only_what_torch_compile_put_there_is_dropped() -> None:
    model = nn.ModuleDict({name: nn.Linear(2, 1, bias=False) for name in ("a_orig_mod", "b", "_orig_mods")})
    model["b"].register_buffer("c_orig_mod", torch.ones(1))
    for _ in range(2):  # compiled twice
        plain, model["b"] = model["b"], nn.Module()
        model["b"].add_module("_orig_mod", plain)
    shared = [name for name, _ in named_tensors(model)]
    assert shared == ["a_orig_mod.weight", "b.weight", "_orig_mods.weight"]
    assert list(local_tensors(model, shared)) == ["b.c_orig_mod"]
    own = nn.Sequential(under("module", nn.DataParallel(under("module", nn.Linear(2, 1, bias=False)))))
    assert [name for name, _ in named_tensors(own)] == ["0.module.module.weight"], "two of three are its own"


def test_named_tensors_has_all_of_a_model_that_shows_what_a_compiled_part_has() -> None:
    """As PEFT's models do, and many that wrap a backbone."""

    class Wrapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Module()
            self.backbone.add_module("_orig_mod", nn.Linear(2, 2, bias=False))
            self.head = nn.Linear(2, 1, bias=False)

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.backbone, name)

    assert [name for name, _ in named_tensors(Wrapping())] == ["backbone.weight", "head.weight"]


def test_averaging_is_rda_for_matrices_only_and_sees_through_ties() -> None:
    task, model = Regression(), Tied()
    rules = {name: task.averaging(model, name, parameter) for name, parameter in named_tensors(model)}
    assert rules == {"head.weight": "mean", "head.bias": "mean", "projection.weight": "rda"}


def test_averaging_takes_convolutions_for_matrices_and_norms_for_vectors() -> None:
    task, model = Regression(), nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    rules = [task.averaging(model, name, parameter) for name, parameter in named_tensors(model)]
    assert rules == ["rda", "mean", "mean", "mean"]


def test_defaults_are_a_constant_rate_and_no_text() -> None:
    task = Regression()
    assert task.lr_scale(0) == task.lr_scale(10**12) == 1.0
    with pytest.raises(TaskError, match="^Regression does not generate text; choose"):
        task.sample(task.build_model(0), "", 1, temperature=1.0, seed=0)


def test_a_minimal_task_trains() -> None:
    task = Regression()
    model = task.build_model(0)
    optimizer = task.build_optimizer(model)
    batch = next(task.batches(stream()))
    before = task.loss(model, batch).item()
    for _ in range(5):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    assert task.loss(model, batch).item() < before
    assert task.tokens(batch) == 2


def test_evaluating_restores_each_submodules_mode_and_the_gradient_even_after_an_error() -> None:
    model = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2))
    model[1].eval()
    with pytest.raises(RuntimeError, match="inside"), evaluating(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
        raise RuntimeError("inside")
    assert [module.training for module in model.modules()] == [True, True, False]
    assert torch.is_grad_enabled()
