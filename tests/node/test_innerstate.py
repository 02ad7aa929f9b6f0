"""`innerstate`: what an inner optimizer keeps comes back in its form; what would do harm begins afresh."""

import math

import psutil
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from gossamer.models.muon import InnerOptimizer
from gossamer.node.trainer.checkpoint import CheckpointWriter, Progress, is_sound, restore, state_keepers
from tests.node.checkpoints import make, metadata_of, saved_in, train, trained, without
from tests.node.optimizers import Around, Sharpness, SharpnessInList, SlowlyAround


@pytest.fixture
def saved(tmp_path):
    return saved_in(tmp_path)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
@pytest.mark.parametrize("laid_out", ["channels last", "transposed"])
def test_a_fused_optimizer_goes_on_as_it_was_whatever_the_parameters_layout(tmp_path, kind, laid_out):
    """It does not look at where its moments lie: a restart would permute them."""

    def build():
        values = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(7))
        channels_last = values.to(memory_format=torch.channels_last)
        parameter = nn.Parameter(values.transpose(0, 1) if laid_out == "transposed" else channels_last)
        options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        return parameter, kind([parameter], lr=0.1, fused=True, **options)

    def step(parameter, optimizer):
        (parameter * torch.arange(1.0, 1 + parameter.numel()).view(parameter.shape)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    _, outer, _ = make()
    parameter, optimizer = build()
    step(parameter, optimizer)
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(1, 1))
    again, fresh = build()
    assert restore(tmp_path / "t", outer, [fresh]) == (Progress(1, 1), True)
    again.data.copy_(parameter.data)
    step(parameter, optimizer)
    step(again, fresh)
    assert torch.equal(again, parameter)


def test_sgd_without_state_and_scalars_come_back(tmp_path):
    model, outer, _ = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(model, outer, optimizer, 2)
    path = tmp_path / "trainer.safetensors"
    CheckpointWriter(path).save(outer, [optimizer], Progress(2, 4))
    again, fresh_outer, _ = make(seed=1)
    fresh = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    assert restore(path, fresh_outer, [fresh]) == (Progress(2, 4), True)
    known = optimizer.state_dict()["state"]
    assert torch.equal(fresh.state_dict()["state"][0]["momentum_buffer"], known[0]["momentum_buffer"])


class Wrapper(torch.optim.Optimizer):
    """As some that work around another optimizer, and share its groups."""

    def __init__(self, base):
        self.base = base
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.base.param_groups = self.param_groups


def test_nothing_that_is_taken_up_is_still_in_the_file(saved):
    """The next checkpoint takes its place, and its room on the disk would be given back to nobody."""
    path, *_ = saved
    _, outer, optimizer = make()
    assert restore(path, outer, [optimizer]) == (Progress(8, 16), True)
    mapped = {where.path for where in psutil.Process().memory_maps()}
    assert optimizer.state_dict()["state"] and not [where for where in mapped if where.startswith(str(path))]


def test_a_wrapper_goes_on_with_the_groups_that_it_shares(tmp_path):
    path = tmp_path / "t"
    model, outer, _ = make()
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=1.0))
    CheckpointWriter(path).save(outer, [optimizer], Progress(1, 1))
    model, outer, _ = make()
    optimizer = Wrapper(torch.optim.SGD(model.parameters(), lr=1.0))
    assert restore(path, outer, [optimizer]) == (Progress(1, 1), True)
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.base.param_groups[0]["lr"] == 0.5


def test_a_schedule_goes_on_with_the_groups_that_it_holds(saved):
    path, _, _ = saved
    _, outer, optimizer = make(seed=1)
    held = optimizer.param_groups[0]
    inner = InnerOptimizer(optimizer)
    assert restore(path, outer, inner.parts) == (Progress(8, 16), True)
    assert optimizer.param_groups[0] is held
    inner.scale_lr(0.5)
    assert optimizer.param_groups[0]["lr"] == 0.5e-2


def test_several_optimizers_come_back_each_with_its_own(tmp_path):
    def split(model):
        first, *others = model.parameters()
        return [torch.optim.SGD([first], lr=0.1, momentum=0.9), torch.optim.AdamW(others)]

    model, outer, _ = make()
    optimizers = split(model)
    model(torch.ones(2, 6)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    path = tmp_path / "t"
    CheckpointWriter(path).save(outer, optimizers, Progress(1, 2))
    fresh_model, fresh_outer, _ = make(seed=1)
    fresh = split(fresh_model)
    assert restore(path, fresh_outer, fresh) == (Progress(1, 2), True)
    for ours, theirs in zip(fresh, optimizers, strict=True):
        for index, state in theirs.state_dict()["state"].items():
            for key, value in state.items():
                assert torch.equal(ours.state_dict()["state"][index][key], value)


class FindsItsRate(torch.optim.Optimizer):
    """Keeps what it learns in its groups, as Prodigy and ScheduleFree do."""

    def __init__(self, params, lr=1.0, d0=0.125):
        super().__init__(params, {"lr": lr, "d0": d0, "d": d0, "k": 0, "best": 1.0, "train_mode": False})

    def step(self, closure=None):
        for group in self.param_groups:
            group["d"], group["k"], group["train_mode"] = group["d"] * 1.5, group["k"] + 1, True
            for parameter in group["params"]:
                self.state[parameter]["s"] = torch.ones_like(parameter)


def in_groups(model, count=2, **options):
    parameters = list(model.parameters())
    share = len(parameters) // count
    groups = [{"params": parameters[i : i + share]} for i in range(0, len(parameters), share)]
    return FindsItsRate(groups, **options)


def test_what_an_optimizer_learns_in_its_groups_comes_back_and_the_rest_is_as_the_script_says(tmp_path):
    """With the tensors alone Prodigy would learn nothing more."""
    model, outer, _ = make()
    optimizer = in_groups(model)
    train(model, outer, optimizer, 2)
    optimizer.param_groups[1]["k"] = 7
    optimizer.param_groups[0]["lr"] = 0.1
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(2, 4))
    model, outer, _ = make()
    fresh = in_groups(model, lr=0.5, d0=0.25)
    others = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    assert restore(tmp_path / "t", outer, [others, fresh]) == (Progress(2, 4), False)
    assert restore(tmp_path / "t", outer, [fresh]) == (Progress(2, 4), True)
    first, second = fresh.param_groups
    assert [first["d"], first["k"], second["d"], second["k"]] == [0.28125, 2, 0.28125, 7]
    assert [first["lr"], first["d0"], first["best"], first["train_mode"]] == [0.5, 0.25, 1.0, False]


@pytest.mark.parametrize("problem", ["other groups", "groups of others", "no number", "a tensor", "a list"])
def test_without_what_an_optimizer_learnt_in_its_groups_all_of_it_begins_afresh(tmp_path, problem):
    model, outer, _ = make()
    optimizer = in_groups(model)
    train(model, outer, optimizer, 2)
    bad = {"no number": float("nan"), "a tensor": torch.tensor(0.3), "a list": [0.3]}
    optimizer.param_groups[0]["best"] = bad.get(problem, 1.0)
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(2, 4))
    model, outer, _ = make()
    fresh = in_groups(model, 4 if problem == "other groups" else 2)
    if problem == "groups of others":
        fresh = FindsItsRate([{"params": group["params"]} for group in reversed(fresh.param_groups)])
    assert restore(tmp_path / "t", outer, [fresh]) == (Progress(2, 4), False)
    assert not fresh.state and [group["d"] for group in fresh.param_groups][:2] == [0.125, 0.125]


class CountsInItsGroups(torch.optim.Optimizer):
    """As timm's Adan, apex's FusedLAMB and those of pytorch_optimizer: the count is put into the group by the
    first step. The constructor takes more than it names."""

    def __init__(self, params, lr=1.0, **others):
        super().__init__(params, {"lr": lr, "lr_max": -1.0})

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["lr_max"], group["is_on"], group["kind"] = 0.5, True, "text"
            for parameter in group["params"]:
                self.state[parameter]["s"] = torch.ones_like(parameter)


def test_what_a_step_puts_into_a_group_comes_back_and_what_the_script_puts_there_is_as_it_says(tmp_path):
    """A bias correction that began at 1 again would take old momenta for new ones."""
    model, outer, _ = make()
    optimizer = CountsInItsGroups([{"params": model.parameters(), "lr_scale": 0.1, "limit": math.inf}])
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=9, cycle_momentum=False)
    train(model, outer, optimizer, 3)
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(3, 6))
    model, outer, _ = make()
    fresh = CountsInItsGroups([{"params": model.parameters(), "lr_scale": 0.2}])
    assert restore(tmp_path / "t", outer, [fresh]) == (Progress(3, 6), True)
    del fresh.param_groups[0]["params"]
    assert fresh.param_groups == [{"lr": 1.0, "lr_max": 0.5, "step": 3, "lr_scale": 0.2}]


def test_a_count_that_is_a_tensor_and_a_state_dict_that_holds_more_begin_afresh(tmp_path):
    class Both(CountsInItsGroups):
        more = {}

        def state_dict(self):
            return super().state_dict() | self.more

    for more, step in ({"total_step": 3}, 1), ({}, torch.tensor(3.0)):
        model, outer, _ = make()
        optimizer = Both(model.parameters())
        train(model, outer, optimizer, 1)
        optimizer.more, optimizer.param_groups[0]["step"] = more, step
        CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(1, 2))
        model, outer, _ = make()
        assert restore(tmp_path / "t", outer, [Both(model.parameters())]) == (Progress(1, 2), False)


class OfAnyArguments(torch.optim.AdamW):
    def __init__(self, params, **options):
        super().__init__(params, **options)


@pytest.mark.parametrize(
    "wrapped", [Around, SlowlyAround, lambda params, base: Around(params, lambda p: Around(p, base))]
)
def test_the_state_of_an_optimizer_inside_another_is_its_own(tmp_path, wrapped):
    """With its tensors alone Prodigy would learn nothing more."""
    model, outer, _ = make()
    optimizer = wrapped(model.parameters(), FindsItsRate)
    train(model, outer, optimizer, 2)
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(2, 4))
    model, outer, _ = make()
    assert restore(tmp_path / "t", outer, [wrapped(model.parameters(), torch.optim.SGD)]) == (
        Progress(2, 4),
        False,
    )
    fresh = wrapped(model.parameters(), FindsItsRate)
    assert restore(tmp_path / "t", outer, [fresh]) == (Progress(2, 4), True)
    assert fresh.param_groups[0]["d"] == 0.28125
    assert all("s" in fresh.optimizer.state_dict()["state"][index] for index in range(4))


@pytest.mark.parametrize("kind", [Sharpness, SharpnessInList])
def test_two_states_one_of_which_is_not_saved_begin_afresh(tmp_path, kind):
    model, outer, _ = make()
    optimizer = kind(model.parameters())
    train(model, outer, optimizer, 2)
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(2, 4))
    assert not any(name.startswith("inner/") for name in load_file(tmp_path / "t"))
    model, outer, _ = make()
    assert restore(tmp_path / "t", outer, [kind(model.parameters())]) == (Progress(2, 4), False)


@pytest.mark.parametrize("key", [0, ("a", "b"), "\ud800"])
def test_a_state_under_keys_that_are_no_text_begins_afresh(tmp_path, key):
    """They would come back as their text, and what is not there be looked for."""
    model, outer, optimizer = make()
    train(model, outer, optimizer, 1)
    for state in optimizer.state.values():
        state[key] = torch.zeros(2)
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(1, 2))
    _, outer, fresh = make()
    assert restore(tmp_path / "t", outer, [fresh]) == (Progress(1, 2), False)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, OfAnyArguments, Around])
def test_arguments_of_an_optimizer_are_not_taken_for_what_it_has_learnt(tmp_path, kind):
    model, outer, _ = make()
    optimizer = kind(model.parameters())
    train(model, outer, optimizer, 1)
    optimizer.param_groups[0].update(lr=0.05, eps=1e-3, initial_lr=0.1)
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(1, 2))
    assert "learnt" not in metadata_of(tmp_path / "t")
    fresh = kind(model.parameters())
    fresh.param_groups[0]["lr"] = 0.2
    assert restore(tmp_path / "t", outer, [fresh]) == (Progress(1, 2), True)
    group = fresh.param_groups[0]
    assert [group["lr"], group["eps"], "initial_lr" in group] == [0.2, 1e-8, False]


class OfNoParameter(torch.optim.AdamW):
    """As some keep a count of their own."""

    def step(self, closure=None):
        self.state["calls"] = 7
        return super().step(closure)


class Lookahead(torch.optim.AdamW):
    """As wrappers around another optimizer save its state beside theirs."""

    def state_dict(self):
        inner = super().state_dict()
        return {"fast_state": inner["state"], "slow_state": {}, "param_groups": inner["param_groups"]}


@pytest.mark.parametrize("kind", [OfNoParameter, Lookahead])
def test_a_state_of_another_form_begins_afresh(tmp_path, kind):
    model, outer, _ = make()
    optimizer = kind(model.parameters())
    train(model, outer, optimizer, 2)
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(2, 4))
    model, outer, _ = make()
    assert restore(tmp_path / "t", outer, [kind(model.parameters())]) == (Progress(2, 4), False)


class NeverSaved(torch.optim.AdamW):
    """As some that are written for one experiment."""

    def state_dict(self):
        raise NotImplementedError


def test_a_state_that_cannot_be_asked_for_is_left_out(tmp_path):
    model, outer, _ = make()
    optimizer = NeverSaved(model.parameters())
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(2, 4))
    assert restore(tmp_path / "t", outer, [optimizer]) == (Progress(2, 4), False)


class NeverLoaded(torch.optim.AdamW):
    def load_state_dict(self, state_dict):
        raise RuntimeError("not here")


def test_a_state_that_is_not_taken_up_costs_no_more_than_itself(tmp_path, caplog):
    model, outer, _ = make()
    optimizer = NeverLoaded(model.parameters())
    train(model, outer, optimizer, 5)
    outer.publish(0, 2, memoryview(bytearray(10_000)))
    CheckpointWriter(tmp_path / "t").save(outer, [optimizer], Progress(2, 4))
    model, again, _ = make()
    again.fragments[0].last_published = 2
    assert restore(tmp_path / "t", again, [NeverLoaded(model.parameters())]) == (Progress(2, 4), False)
    assert any(momentum.any() for momentum in again.fragments[0].buffers["momentum"])
    assert (
        "NeverLoaded does not take its saved state (RuntimeError: not here): it starts afresh" in caplog.text
    )


def test_an_inner_state_of_tensors_of_another_kind_is_left_out_and_the_rest_is_kept(tmp_path):
    class Quantised(torch.Tensor):
        pass

    _, outer, optimizer = trained()
    state = next(iter(optimizer.state.values()))
    state["exp_avg"] = state["exp_avg"].as_subclass(Quantised)
    path = tmp_path / "trainer.safetensors"
    CheckpointWriter(path).save(outer, [optimizer], Progress(8, 16))
    _, again, fresh = make(seed=1)
    assert restore(path, again, [fresh]) == (Progress(8, 16), False)


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_an_inner_state_of_tensors_whose_elements_are_not_there_begins_afresh(tmp_path, kind):
    """SGD with momentum keeps the sum of sparse gradients sparse."""
    _, outer, _ = make()
    table = nn.Embedding(9, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    table(torch.tensor([1, 4])).sum().backward()
    optimizer.step()
    state = optimizer.state[table.weight]
    assert state["momentum_buffer"].is_sparse
    if kind == "meta":
        state["momentum_buffer"] = torch.empty(9, 2, device="meta")
    path = tmp_path / "t"
    writer = CheckpointWriter(path)
    writer.begin(outer, [optimizer])
    while not path.exists():
        writer.advance(Progress(1, 2), wait=True)
    writer.close()
    fresh = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    assert restore(path, make()[1], [fresh]) == (Progress(1, 2), False)


class InFloat32(torch.optim.Optimizer):
    """Keeps a mean in float32 and a text of each parameter, whatever its dtype, as some do for bf16."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["mean"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["kind"] = "plain"
            state["mean"].add_(1 / 3)


@pytest.mark.parametrize("now", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("says", [True, False])
def test_a_state_comes_back_in_its_own_dtype_where_the_parameters_is_as_it_was(tmp_path, now, says):
    def build(dtype):
        model, outer, _ = make()
        return outer, InFloat32(model.to(dtype).parameters())

    path = tmp_path / "t"
    outer, optimizer = build(torch.bfloat16)
    optimizer.step()
    CheckpointWriter(path).save(outer, [optimizer], Progress(1, 8))
    if not says:
        without(path, "dtypes")
    again, fresh = build(now)
    assert restore(path, again, [fresh]) == (Progress(1, 8), True)
    expected = torch.float32 if says and now == torch.bfloat16 else now
    for before, after in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert after["mean"].dtype == expected
        assert torch.equal(after["mean"], before["mean"].to(expected))
        assert after["kind"] == "plain"


def test_optimizers_that_know_each_other_keep_their_own_states(tmp_path, caplog):
    """As a GAN's may."""

    def known(model):
        a, b = (torch.optim.Adam(part.parameters()) for part in model)
        a.other, b.others = b, [a]
        return [a, b]

    model, outer, _ = make()
    optimizers = known(model)
    model(torch.ones(2, 6)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    CheckpointWriter(tmp_path / "t").save(outer, optimizers, Progress(1, 2))
    model, outer, _ = make(seed=1)
    fresh = known(model)
    assert restore(tmp_path / "t", outer, fresh) == (Progress(1, 2), True)
    assert [len(optimizer.state) for optimizer in fresh] == [2, 2] and not caplog.text


def test_one_of_other_parameters_is_not_taken_for_what_an_optimizer_is_around():
    """Before the first step neither keeps anything, and what is empty is the same."""
    model, _, optimizer = make()
    optimizer.part = torch.optim.SGD(model[0].parameters())
    assert state_keepers([optimizer]) is None
    assert state_keepers([around := Around(model.parameters())]) == [around.optimizer]


def test_an_inner_state_is_judged_by_itself():
    """A checkpoint has the outer optimizer's tensors in the same file."""
    sound, spoilt = torch.ones(2), torch.tensor([1.0, math.nan])
    assert is_sound({"inner/0/0/exp_avg": sound, "residual": spoilt}, [{"d": 1.0}])
    assert not is_sound({"inner/0/0/exp_avg": spoilt}, [])
    assert not is_sound({}, [{"d": math.inf}])
