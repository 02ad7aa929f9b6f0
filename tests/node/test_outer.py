"""`outer`: what its docstring says against plain float64 arithmetic, and what must never be lost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gossamer.models.task import named_tensors
from gossamer.node.trainer import encoders
from gossamer.node.trainer.outer import OuterLoop
from gossamer.protocol import payloads
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.errors import DivergedError
from gossamer.protocol.fixedpoint import ONE, VALUE_LIMIT, Ints, to_fixed
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payloads import Payload, TensorSpec
from tests.protocol.builders import manifest as build_manifest
from tests.protocol.builders import one_rung

pytestmark = pytest.mark.usefixtures("on_each_device")


class Net(nn.Module):
    """Two matrices and a vector; `head` is tied, `frozen` does not train."""

    def __init__(self, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8)
        self.linear = nn.Linear(8, 8)
        if tied:
            self.head = nn.Linear(8, 12, bias=False)
            self.head.weight = self.embed.weight
        if frozen:
            self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)


ONE_LENGTH = {"every_steps": 0, "every_seconds": 30.0}
"""Windows that are alike, however many steps they have."""


def manifest_for(
    model: nn.Module, fragments: int = 1, pace: dict[str, float] | None = None, **outer: object
) -> Manifest:
    specs = tuple(TensorSpec(n, tuple(p.shape), "mean") for n, p in named_tensors(model))
    settings = {"codec": "exact", "learning_rate": 0.5, "momentum": 0.7, "ef_decay": 1.0, **outer}
    return build_manifest(specs, fragments, outer=one_rung(**settings), pace=pace or ONE_LENGTH)


def loop_for(model: nn.Module, manifest: Manifest) -> OuterLoop:
    return OuterLoop(dict(named_tensors(model)), manifest)


def area(manifest: Manifest) -> memoryview:
    return memoryview(bytearray(manifest.payload_max))


def publish(loop: OuterLoop, manifest: Manifest, round_: int, codec: str = "") -> tuple[Ints, int]:
    """Publish; returns what every receiver decodes, in the fragment's order, and the base."""
    out = area(manifest)
    fragment = manifest.plan().of_round(round_)
    length, window = loop.publish(fragment.index, round_, out, codec)
    payload = Payload(codec or manifest.outer.codecs[0].name, fragment, bytes(out[:length]))
    return np.concatenate([payload.tensor(i) for i in range(payload.tensors)]), window.base


def flat(loop: OuterLoop, index: int = 0) -> np.ndarray:
    parts = [theta.detach().double().reshape(-1) for theta in loop.fragments[index].theta]
    return torch.cat(parts).cpu().numpy()


def train(loop: OuterLoop, rng: np.random.Generator, steps: int = 3, size: float = 0.01) -> None:
    """Inner steps: any movement will do."""
    for _ in range(steps):
        with torch.no_grad():
            for state in loop.fragments:
                for theta in state.theta:
                    theta.add_(torch.from_numpy(rng.normal(0, size, tuple(theta.shape))).to(theta))
        loop.step(100, 2.0)


def phi_of(loop: OuterLoop, index: int = 0) -> Ints:
    return to_fixed(flat(loop, index))


# -- windows


def test_deltas_of_all_fragments_together_state_every_token_once_for_each(rng: np.random.Generator) -> None:
    """From which `Layout.trained_tokens` tells how many were trained on."""
    manifest = manifest_for(nn.Sequential(Net(), nn.Linear(2, 2)), fragments=4)
    loop = loop_for(nn.Sequential(Net(), nn.Linear(2, 2)), manifest)
    stated = 0
    for round_ in range(20):
        train(loop, rng, steps=1)
        stated += loop.publish(round_ % 4, round_, area(manifest))[1].tokens
    stated += sum(state.window.tokens for state in loop.fragments)
    assert len(loop.fragments) == 4 and manifest.plan().trained_tokens(stated) == 20 * 100


# -- arithmetic


@pytest.mark.parametrize(("codec", "mu", "lr", "decay"), [
    ("exact", 0.7, 0.5, 1.0), ("int4", 0.7, 0.5, 1.0), ("int2", 0.0, 1.0, 0.9), ("topk", 0.0, 1.0, 0.9)
])  # fmt: skip
def test_publishing_follows_the_design(
    rng: np.random.Generator, codec: str, mu: float, lr: float, decay: float
) -> None:
    model = Net()
    manifest = manifest_for(model, codec=codec, momentum=mu, learning_rate=lr, ef_decay=decay)
    loop = loop_for(model, manifest)
    phi = phi_of(loop)
    loop.apply(0, phi, 0, keep_progress=False)
    momentum = np.zeros(phi.size)
    residual = np.zeros(phi.size)
    for round_ in range(1, 9):
        ref = flat(loop)
        train(loop, rng)
        gradient = ref - flat(loop)
        momentum = mu * momentum + gradient
        wanted = lr * (gradient + mu * momentum) + decay * residual
        sent, base = publish(loop, manifest, round_)
        residual = wanted - sent / ONE
        state = loop.fragments[0]
        ours = np.concatenate([e.reshape(-1).cpu().numpy() for e in state.saved["residual"]]) / ONE
        assert np.abs(ours - residual).max() < 1e-6, "float32 against float64"
        assert np.abs(flat(loop) - (ref - sent / ONE)).max() < 1e-6, "training goes on from our own step"
        assert base == round_ - 1
        phi = phi - sent
        loop.apply(0, phi, round_)
        assert np.abs(flat(loop) - phi / ONE).max() < 1e-6, "Merge of our record alone returns it whole"


def replace_data(model: Net) -> None:
    model.linear.weight.data = model.linear.weight.data.t().contiguous().t() + 0.1


def load(model: Net) -> None:
    model.load_state_dict({name: value + 0.1 for name, value in model.state_dict().items()})


@pytest.mark.parametrize("change", [replace_data, load])
def test_what_a_script_puts_in_place_of_values_is_progress_like_any_other(
    rng: np.random.Generator, change: Callable[[Net], object]
) -> None:
    model = Net()
    manifest = manifest_for(model, momentum=0.0, learning_rate=1.0)
    loop = loop_for(model, manifest)
    phi = phi_of(loop)
    loop.apply(0, phi, 0, keep_progress=False)
    train(loop, rng)
    change(model)
    wanted = flat(loop)
    phi = phi - publish(loop, manifest, 1)[0]
    assert np.abs(phi / ONE - wanted).max() < 1e-6
    loop.apply(0, phi, 1)
    live = torch.cat([p.detach().double().flatten() for p in model.parameters()]).cpu().numpy()
    assert np.array_equal(live, flat(loop)), "what is published and set is what the model computes with"
    assert np.abs(live - phi / ONE).max() < 1e-6


def test_what_a_codec_left_out_counts_as_much_in_the_next(rng: np.random.Generator) -> None:
    """Whichever codecs it went through, and whatever their learning rates, all of the progress is sent."""
    rates = {"int4": 1.0, "topk8": 1.5, "topk": 3.0}
    ladder = [{"name": name, "learning_rate": rate} for name, rate in rates.items()]
    manifest = manifest_for(model := Net(), codecs=ladder, momentum=0.0)
    loop = loop_for(model, manifest)
    loop.apply(0, phi_of(loop), 0, keep_progress=False)
    missing = np.zeros(manifest.plan().numel)
    for round_, codec in enumerate(rng.choice(list(rates), 30), 1):
        before = flat(loop)
        train(loop, rng)
        missing += before - flat(loop)
        missing -= publish(loop, manifest, round_, codec)[0] / ONE / rates[codec]
        left = torch.cat([row.reshape(-1) for row in loop.fragments[0].saved["residual"]]).cpu().numpy()
        assert np.abs(missing - left / ONE / rates[codec]).max() < 1e-5


@pytest.mark.parametrize("codec", ["exact", "int8", "int4", "int2", "topk"])
def test_error_feedback_loses_nothing(rng: np.random.Generator, codec: str) -> None:
    """All that was sent and what is left in the residual is all that was trained, to the unit."""
    model = Net()
    manifest = manifest_for(model, codec=codec, momentum=0.0, learning_rate=1.0)
    loop = loop_for(model, manifest)
    phi = phi_of(loop)
    loop.apply(0, phi, 0, keep_progress=False)
    sent_all = np.zeros(phi.size, dtype=np.int64)
    trained = np.zeros(phi.size, dtype=np.int64)
    for round_ in range(1, 20):
        ref = torch.cat([r.reshape(-1) for r in loop.fragments[0].ref])
        train(loop, rng)
        theta = torch.cat([t.detach().reshape(-1) for t in loop.fragments[0].theta])
        trained += ((ref - theta) * ONE).round().long().cpu().numpy()
        sent, _ = publish(loop, manifest, round_)
        sent_all += sent
        phi = phi - sent
        loop.apply(0, phi, round_)
    residual = torch.cat([e.reshape(-1) for e in loop.fragments[0].saved["residual"]]).long().cpu().numpy()
    assert np.array_equal(sent_all + residual, trained)


def test_applying_keeps_local_progress(rng: np.random.Generator) -> None:
    model = Net()
    manifest = manifest_for(model)
    loop = loop_for(model, manifest)
    phi = phi_of(loop)
    loop.apply(0, phi, 0, keep_progress=False)
    train(loop, rng)
    progress = flat(loop) - phi / ONE
    for round_ in (1, 2, 3):
        phi = phi + rng.integers(-(1 << 20), 1 << 20, phi.size).astype(np.int32)
        loop.apply(0, phi, round_)
        assert np.abs(flat(loop) - (phi / ONE + progress)).max() < 1e-6
    assert loop.fragments[0].window.base == 0, "the window began before them"
    loop.reset()
    assert np.abs(flat(loop) - phi / ONE).max() < 1e-6
    train(loop, rng)
    loop.apply(0, phi, 3, keep_progress=False)
    assert np.abs(flat(loop) - phi / ONE).max() < 1e-6


def test_fragments_do_not_touch_each_other(rng: np.random.Generator) -> None:
    model = Net()
    manifest = manifest_for(model, fragments=2)
    loop = loop_for(model, manifest)
    for index in range(2):
        loop.apply(index, phi_of(loop, index), index - 2 if index else 0, keep_progress=False)
    train(loop, rng, steps=5)
    before = flat(loop, 0)
    _, base = publish(loop, manifest, 1)
    assert base == -1
    assert np.array_equal(flat(loop, 0), before)
    assert loop.fragments[0].window.steps == 5 and loop.fragments[1].window.steps == 0
    train(loop, rng, steps=2)
    _, window = loop.publish(0, 2, area(manifest))
    assert (window.steps, window.tokens, window.mean_loss, window.base) == (7, 700, 2.0, 0)
    _, base = publish(loop, manifest, 3)
    assert base == 1, "our own delta of round 1 is what this window began from"


@pytest.mark.parametrize(
    ("merged", "rounds", "bases"),
    [
        ([(0, 7)], [7], [6]),  # joined while others were at that round
        ([(0, 7), (1, 12)], [7, 13], [6, 12]),
        ([(0, 12)], [11, 14], [10, 12]),  # a late delta
        ([(0, 3)], [5, 7], [3, 5]),  # our own delta is in it, though not merged yet
    ],
)
@pytest.mark.parametrize("resets", [False, True])
def test_a_window_is_based_on_what_was_merged_before_its_round(
    merged: list[tuple[int, int]], rounds: list[int], bases: list[int], resets: bool
) -> None:
    loop = loop_for(Net(), manifest := manifest_for(Net()))
    found = []
    for number, round_ in enumerate(rounds):
        for at, merged_round in merged:
            if at == number:
                loop.apply(0, phi_of(loop), merged_round)
        if resets:
            loop.step(100, 5.0)
            loop.reset()
        loop.step(100, 2.0)
        _, window = loop.publish(0, round_, area(manifest))
        found.append(window.base)
        assert (window.steps, window.mean_loss, window.changed) == (1, 2.0, False)
    assert found == bases


# -- pieces, and how parameters lie in memory


def trajectory(model: nn.Module, codec: str, seed: int) -> list[torch.Tensor]:
    """Train, publish and apply for some rounds; returns all of the state, and the last payload."""
    manifest = manifest_for(model, codec=codec)
    loop, rng = loop_for(model, manifest), np.random.default_rng(seed)
    phi = phi_of(loop)
    loop.apply(0, phi, 0, keep_progress=False)
    sent = phi
    for round_ in (1, 2):
        train(loop, rng)
        sent, _ = publish(loop, manifest, round_)
        phi = phi - sent
        loop.apply(0, phi, round_)
    state = loop.fragments[0]
    return [
        *state.theta,
        *state.ref,
        *state.saved["residual"],
        *state.saved["momentum"],
        torch.from_numpy(sent),
    ]


@pytest.mark.parametrize("codec", ["exact", "int4", "int2", "topk"])
def test_pieces_do_not_show(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Linear(120, 100)
    again = copy.deepcopy(model)
    whole = trajectory(model, codec, 1)
    for name in ("PIECE_CPU", "PIECE_DEVICE"):
        monkeypatch.setattr(encoders, name, 4096)
    in_pieces = trajectory(again, codec, 1)
    assert all(torch.equal(a, b) for a, b in zip(whole, in_pieces, strict=True))


def many(count: int) -> nn.Module:
    """Small tensors of many shapes, one of them not contiguous, and a large one."""
    torch.manual_seed(0)
    shapes = [(8, 8), (300,), (), (5, 70), (17, 9, 31)]
    tensors = [torch.randn(shapes[i % len(shapes)]) * 0.1 for i in range(count)]
    return nn.ParameterList([torch.randn(130, 140) * 0.1, *tensors, torch.randn(40, 30).t()])


@pytest.mark.parametrize("codec", ["int8", "int4", "int2", "topk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buckets_do_not_show(codec: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are several, which use the same memory, each for tensors of other sizes."""
    model = many(60).to(dtype)
    again = copy.deepcopy(model)
    for name in ("PIECE_CPU", "PIECE_DEVICE"):
        monkeypatch.setattr(encoders, name, 1 << 13)
    together = trajectory(model, codec, 1)
    for name in ("SMALL_NUMEL", "SMALL_NUMEL_DEVICE"):
        monkeypatch.setattr(encoders, name, 0)
    alone = trajectory(again, codec, 1)
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


VIEWS = {"aten::detach", "aten::lift_fresh", "aten::view"}


class Calls(TorchDispatchMode):
    """Counts what torch is asked to compute, and on how many cores; a view is nothing of the kind, and
    releases differ in how many they make of them."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.cores: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.name() not in VIEWS:
            self.number += 1
            self.cores.add(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


def calls_of(count: int) -> tuple[int, int]:
    """Of publishing, and of applying, a model of so many small tensors."""
    model = many(count)
    manifest = manifest_for(model, codec="int4")
    loop = loop_for(model, manifest)
    phi = phi_of(loop)
    with Calls() as publishing:
        loop.publish(0, 1, area(manifest))
    with Calls() as applying:
        loop.apply(0, phi, 1)
    return publishing.number, applying.number


def test_a_small_tensor_costs_few_calls() -> None:
    """Encoding one by itself takes some 40, and each as long as working through a thousand values."""
    few, more = calls_of(100), calls_of(1000)
    assert more[0] - few[0] <= 450, "publishing"
    assert more[1] - few[1] <= 90, "applying"


def test_it_computes_on_one_core_and_leaves_the_loop_its_own() -> None:
    model, cores = Net(), torch.get_num_threads()
    manifest = manifest_for(model)
    loop = loop_for(model, manifest)
    phi = torch.from_numpy(phi_of(loop)).to(model.linear.weight.device)
    torch.set_num_threads(3)
    try:
        with Calls() as calls:
            loop.publish(0, 1, area(manifest))
            loop.apply(0, phi, 1)
        assert calls.cores == {1} and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(cores)


class Made(TorchDispatchMode):
    """Finds out how many bytes the largest tensor has that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        results = func(*args, **(kwargs or {}))
        given, made = (
            [one.untyped_storage() for one in tree_leaves(tree) if isinstance(one, torch.Tensor)]
            for tree in ((args, kwargs), results)
        )
        known = {memory.data_ptr() for memory in given}
        self.largest = max(self.largest, *(m.nbytes() for m in made if m.data_ptr() not in known), 0)
        return results


@pytest.mark.parametrize("codec", ["int4", "int2", "topk"])
@pytest.mark.parametrize("make", [lambda: many(400), lambda: nn.Linear(600, 500, bias=False)])
def test_neither_many_small_tensors_nor_a_large_one_need_new_memory_as_they_are_sent(
    codec: str, make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer to get than to fill, and the loop waits: what is made is for a piece at a time."""
    for name in ("PIECE_CPU", "PIECE_DEVICE"):
        monkeypatch.setattr(encoders, name, 1 << 14)
    model = make()
    loop = loop_for(model, manifest := manifest_for(model, codec=codec))
    phi, out = torch.from_numpy(phi_of(loop)).to(loop.fragments[0].theta[0].device), area(manifest)
    with Made() as made:
        loop.apply(0, phi, 1)
        loop.publish(0, 2, out)
    assert 0 < made.largest <= max(8 * (1 << 14), len(out) if phi.is_cuda else 0)


def test_a_model_in_channels_last_is_the_same_model() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 5, 3)
    turned = copy.deepcopy(model).to(memory_format=torch.channels_last)
    assert not turned.weight.is_contiguous()
    plain, channels_last = trajectory(model, "int4", 1), trajectory(turned, "int4", 1)
    assert all(torch.equal(a, b) for a, b in zip(plain, channels_last, strict=True))
    assert not turned.weight.is_contiguous(), "it stays as the user made it"


# -- models that do not fit, and training that blew up


@pytest.mark.parametrize("codec", ["exact", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 80.0, -1000.0])
def test_divergence_names_the_tensor(value: float, codec: str) -> None:
    model = Net()
    manifest = manifest_for(model, codec=codec)
    loop = loop_for(model, manifest)
    with torch.no_grad():
        model.linear.weight[3, 3] = value
    with pytest.raises(DivergedError, match=r"linear\.weight.*lower the learning rate"):
        publish(loop, manifest, 1)


@pytest.mark.parametrize("codec", ["exact", "int8", "topk"])
def test_a_fragment_that_diverged_is_sound_again_once_it_is_loaded(codec: str) -> None:
    """Nothing of what was learnt is left: neither progress, nor residual, nor momentum."""
    model = nn.Sequential(*(nn.Linear(200, 200, bias=False) for _ in range(2)))
    manifest = manifest_for(model, codec=codec)
    loop = loop_for(model, manifest)
    phi = phi_of(loop)
    with torch.no_grad():
        model[0].weight.view(-1)[::64] += 0.12
        model[1].weight[3, 3] = float("nan")
    loop.step(100, 2.0)
    with pytest.raises(DivergedError, match=r"1\.weight"):
        publish(loop, manifest, 1)
    loop.forget()
    loop.apply(0, phi, 1, keep_progress=False)
    assert np.array_equal(phi_of(loop), phi)
    loop.step(100, 2.0)
    sent, _ = publish(loop, manifest, 2)
    assert not sent.any()


@pytest.mark.parametrize(
    ("ref", "moved", "momentum", "is_sound"),
    [
        (0.0, 1.0, 0.0, True),
        (0.0, 34.0, 0.0, True),
        (0.0, 80.0, 0.0, False),
        (0.0, 1.0, 300.0, False),
        (-55.0, 0.1, 0.0, True),
        (60.0, 5.0, 0.0, False),
        (60.0, 0.1, 20.0, False),
        (0.0, 0.0, float("nan"), False),
        (float("inf"), 0.0, 0.0, False),
    ],
)
def test_a_step_is_published_if_it_is_short_and_ends_within_64(
    ref: float, moved: float, momentum: float, is_sound: bool
) -> None:
    """A step is 0.5 * (1.7 * moved + 0.49 * momentum)."""
    model = nn.Linear(3, 3, bias=False)
    nn.init.constant_(model.weight, ref)
    loop = loop_for(model, manifest := manifest_for(model))
    with torch.no_grad():
        model.weight[1, 1] += moved
        loop.fragments[0].saved["momentum"][0][2, 2] = -momentum
    if is_sound:
        publish(loop, manifest, 1)
        return
    with pytest.raises(DivergedError, match="64"):
        publish(loop, manifest, 1)


def test_what_is_still_to_be_sent_has_a_limit() -> None:
    """Of such a delta most is left over, time and again, and would become its opposite in int32."""
    model = nn.Linear(64, 64, bias=False)
    manifest = manifest_for(model, codec="topk", momentum=0.0, learning_rate=1.0)
    loop = loop_for(model, manifest)
    (residual,) = loop.fragments[0].saved["residual"]
    for sign in (1, -1):
        residual.fill_(sign * (VALUE_LIMIT - 1))
        with torch.no_grad():
            model.weight.sub_(sign * 30.0)
        publish(loop, manifest, 1)
        assert (sign * residual).max() == VALUE_LIMIT - 1


def test_tied_weights_are_one_and_frozen_ones_none(rng: np.random.Generator) -> None:
    model = Net(tied=True, frozen=True)
    manifest = manifest_for(model)
    assert [spec.name for spec in manifest.layout.tensors] == ["embed.weight", "linear.weight", "linear.bias"]
    loop = loop_for(model, manifest)
    loop.apply(0, phi_of(loop), 0, keep_progress=False)
    train(loop, rng)
    publish(loop, manifest, 1)
    assert torch.equal(model.head.weight, model.embed.weight)
    assert torch.equal(model.frozen, torch.zeros(3))


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_fixed_point_cannot_hold_stays_as_it_is_while_nobody_trains_it(
    codec: str, dtype: torch.dtype, rng: np.random.Generator
) -> None:
    """An epsilon of 1e-8, alone and in a large tensor of its like."""
    tiny = {
        "epsilon": torch.tensor(1e-8),
        "scale": torch.full((6,), -2e-8),
        "wide": torch.full((300, 200), 9e-9),
    }
    own = {"net": torch.randn(5, 4), "zero": torch.zeros(3)}
    model = nn.ParameterDict({name: values.to(dtype) for name, values in {**own, **tiny}.items()})
    before = copy.deepcopy(model.state_dict())
    manifest = manifest_for(model, codec=codec, momentum=0.9, learning_rate=0.7)
    loop = loop_for(model, manifest)
    phi = phi_of(loop)
    loop.apply(0, phi, 0, keep_progress=False)
    for round_ in range(1, 9):
        with torch.no_grad():
            model["net"].add_(torch.randn(5, 4).to(model["net"]))
        loop.step(100, 2.0)
        sent, _ = publish(loop, manifest, round_)
        phi = phi - sent
        loop.apply(0, phi, round_)
    loop.reset()
    assert not torch.equal(model["net"], before["net"])
    assert not model["zero"].any()
    for name in tiny:
        assert torch.allclose(model[name], before[name], rtol=1e-6, atol=0), name

    with torch.no_grad():
        model["scale"].add_(0.5)
    loop.step(100, 2.0)
    sent, _ = publish(loop, manifest, 9)
    at = next(slot for slot in manifest.plan().fragments[0].slots if slot.spec.name == "scale").span
    assert sent[at].min() < -(ONE // 4), "what trains it is published"
    loop.apply(0, phi - sent, 9)
    expected = torch.from_numpy(-sent[at] / ONE).to(model["scale"])
    assert torch.allclose(model["scale"], expected, rtol=0, atol=2.1e-8)


def test_a_few_small_values_of_many_take_no_memory() -> None:
    model = Net()
    with torch.no_grad():
        model.linear.weight.fill_(0.1)[0, 0] = 1e-8
        model.linear.bias.fill_(1e-8)
    held = [part.vanishing for part in loop_for(model, manifest_for(model)).fragments[0].parts]
    lost = sum(values.count_nonzero() for values in held if values is not None)
    assert lost == 1 + 8, "one of 64 is more than a thousandth"
    assert all(part.vanishing is None for part in loop_for(Net(), manifest_for(Net())).fragments[0].parts)


# -- tensors that are cut


@pytest.mark.parametrize(("dtype", "transposed"), [
    (torch.float32, False), (torch.float32, True), (torch.bfloat16, True)
])  # fmt: skip
@pytest.mark.parametrize("codec", sorted(CODECS))
def test_strips_are_trained_as_tensors_of_their_own(
    rng: np.random.Generator, codec: str, dtype: torch.dtype, transposed: bool
) -> None:
    """One matrix in both fragments, against a tensor for each of its strips, bit for bit."""
    first = torch.from_numpy(rng.normal(0, 0.02, (300, 500)))
    first[-10:] = 1e-8  # which fixed point cannot hold
    matrix = first.T.contiguous().T if transposed else first
    edge = 2 * payloads.STRIP
    cut = nn.ParameterDict({"w": matrix.to(dtype), "b": torch.ones(7, dtype=dtype)})
    whole = nn.ParameterDict({
        "w": first.view(-1)[:edge].to(dtype), "w2": first.view(-1)[edge:].to(dtype), "b": cut["b"].clone()
    })  # fmt: skip
    manifests = [manifest_for(model, 2, codec=codec) for model in (cut, whole)]
    loops = [loop_for(*both) for both in zip((cut, whole), manifests, strict=True)]
    assert cut["w"].is_contiguous() != transposed
    assert [len(state.theta) for state in loops[0].fragments] == [1, 2]

    def held(model: nn.Module) -> torch.Tensor:
        return torch.cat([model[key].detach().reshape(-1) for key in ("w", "w2", "b") if key in model])

    phis = [[np.random.default_rng(3).integers(-ONE, ONE, f.numel, np.int32) for f in m.plan().fragments]
            for m in manifests]  # fmt: skip
    for round_ in range(2, 8):
        index = round_ % 2
        moved = torch.from_numpy(rng.normal(0, 0.01, held(cut).numel())).to(held(cut))
        with torch.no_grad():
            cut["w"].add_(moved[:150_000].view(300, 500))
            for key, values in zip(("w", "w2", "b"), moved.split([edge, 150_000 - edge, 7]), strict=True):
                whole[key].add_(values)
            cut["b"].add_(moved[-7:])
        sent = []
        for loop, manifest, phi in zip(loops, manifests, phis, strict=True):
            loop.step(1, 1.0)
            sent.append(publish(loop, manifest, round_)[0])
            phi[index] -= sent[-1]
            if round_ > 4:
                loop.apply(index, phi[index], round_)
        assert np.array_equal(*sent) and sent[0].any()
        assert torch.equal(held(cut), held(whole))
    for loop in loops:
        loop.step(1, 1.0)
        loop.reset()
    assert torch.equal(held(cut), held(whole))


# -- bf16


def test_bf16_rounding_is_not_progress() -> None:
    """A window without training sends nothing, though bf16 cannot hold Phi."""
    model = Net().to(torch.bfloat16)
    manifest = manifest_for(model, momentum=0.0, learning_rate=1.0)
    loop = loop_for(model, manifest)
    rng = np.random.default_rng(1)
    phi = rng.integers(-(1 << 24), 1 << 24, manifest.plan().numel).astype(np.int32)
    loop.apply(0, phi, 0, keep_progress=False)
    assert model.linear.weight.dtype is torch.bfloat16
    loop.step(10, 1.0)
    sent, _ = publish(loop, manifest, 1)
    assert not sent.any()


def test_bf16_training_is_sent_as_it_moved(rng: np.random.Generator) -> None:
    model = Net().to(torch.bfloat16)
    manifest = manifest_for(model, momentum=0.0, learning_rate=1.0)
    loop = loop_for(model, manifest)
    phi = phi_of(loop)
    loop.apply(0, phi, 0, keep_progress=False)
    for round_ in range(1, 6):
        before = flat(loop)
        train(loop, rng, size=0.1)
        moved = before - flat(loop)
        sent, _ = publish(loop, manifest, round_)
        assert np.abs(sent / ONE - moved).max() < 1e-6
        phi = phi - sent
        loop.apply(0, phi, round_)
        assert np.abs(flat(loop) - phi / ONE).max() < 0.02, "within bf16's resolution of Phi"


def test_the_loss_may_be_a_tensor() -> None:
    model = Net()
    manifest = manifest_for(model)
    loop = loop_for(model, manifest)
    loss = model.linear(torch.ones(8)).sum()
    loop.step(10, loss)
    loop.step(10, loss)
    _, window = loop.publish(0, 1, area(manifest))
    assert window.mean_loss == pytest.approx(float(loss.detach()))
    assert isinstance(window.loss, float) == loss.is_cpu, "no device was waited for at a step"
    assert isinstance(window.loss, float) or window.loss.grad_fn is None, "the graph behind it is dropped"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("casts_to", [torch.bfloat16, torch.float16])
def test_a_scripts_autocast_changes_nothing(casts_to: torch.dtype, dtype: torch.dtype) -> None:
    """All of its loop may be in it, `step` too."""
    model = many(6).to(dtype)
    again = copy.deepcopy(model)
    plainly = trajectory(model, "int4", 1)
    with torch.autocast(next(again.parameters()).device.type, casts_to):
        assert all(map(torch.equal, trajectory(again, "int4", 1), plainly))


@pytest.fixture
def odd_defaults() -> Iterator[None]:
    """What tensors are where nobody says otherwise, as large models are often built."""
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def test_a_scripts_default_dtype_and_device_change_nothing(
    rng: np.random.Generator, odd_defaults: None
) -> None:
    with torch.device("cpu"):
        model = Net().float()
    manifest = manifest_for(model)
    loop = loop_for(model, manifest)
    phi = phi_of(loop)
    loop.apply(0, phi, 0, keep_progress=False)
    assert np.array_equal(phi_of(loop), phi)
    train(loop, rng)
    moved = phi_of(loop)
    sent, _ = publish(loop, manifest, 1)
    assert np.abs(sent - 0.5 * 1.7 * (phi - moved)).max() <= 2, "in float32, not bf16"


@pytest.mark.parametrize("length", [1, 4, 12])
def test_momentum_reaches_over_as_many_steps_whatever_the_length_of_windows(length: int) -> None:
    """And progress moves the model as far in the end."""
    model = nn.Linear(3, 3, bias=False)
    loop = loop_for(model, manifest := manifest_for(model, pace={"every_steps": 4, "every_seconds": 0.0}))
    (momentum,) = loop.fragments[0].saved["momentum"]
    moved, before = 0.0, torch.zeros(3, 3)
    for step in range(1, 201):
        with torch.no_grad():
            model.weight.sub_(0.01 if step <= 24 else 0.0)
        loop.step(100, 2.0)
        if step % length == 0:
            moved += publish(loop, manifest, step // length)[0][0] / ONE
        if step == 24:
            before = momentum.clone()
        if step == 48:
            torch.testing.assert_close(momentum, before * 0.7 ** (24 / 4))
    assert moved == pytest.approx(24 * 0.01 * 0.5 / (1 - 0.7), rel=1e-3)


@pytest.mark.parametrize("codec", ["int4", "exact"])
def test_momentum_fades_to_nothing_where_nothing_trains(codec: str, rng: np.random.Generator) -> None:
    """Denormal values are slow, and at 0.7 of it each time the smallest of them rounds to itself for ever."""
    manifest = manifest_for(Net(), codec=codec)
    loop = loop_for(Net(), manifest)
    momentum = loop.fragments[0].saved["momentum"]
    train(loop, rng)
    publish(loop, manifest, 1)
    assert all(part.abs().min() > 0 for part in momentum)
    for round_ in range(2, 130):
        loop.step(100, 2.0)
        publish(loop, manifest, round_)
    assert not any(part.any() for part in momentum)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_phi_that_has_not_changed_moves_nothing(dtype: torch.dtype, rng: np.random.Generator) -> None:
    """Rounded progress would: a fifth of what has moved as far as weights are large, at every apply."""
    model = Net().to(dtype)
    loop = loop_for(model, manifest_for(Net()))
    phi = phi_of(loop) + rng.integers(-(2**9), 2**9, loop.fragments[0].fragment.numel, dtype=np.int32)
    loop.apply(0, phi, 0, keep_progress=False)
    train(loop, rng)
    before = copy.deepcopy(model.state_dict())
    for round_ in range(3):
        loop.apply(0, phi, round_)
    for name, values in model.state_dict().items():
        assert torch.equal(values, before[name]) or dtype == torch.float64, name
        assert torch.allclose(values, before[name], rtol=0, atol=1e-15), name
