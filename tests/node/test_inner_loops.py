"""Whatever people train with: optimizers, precisions, wrappers and odd models, each as one `Peer`."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, AdamW, Optimizer

from gossamer.bootstrap.manifests import describe
from gossamer.models.task import named_tensors
from gossamer.node.trainer.genesis import parameters
from gossamer.node.trainer.outer import OuterLoop
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.fixedpoint import ONE
from gossamer.protocol.manifest import Manifest
from tests.node.leading import leading
from tests.node.trainer_side import daemon_at, link_to, until

EVERY = 3


class Net(nn.Module):
    """A tied head, a frozen layer, batch norm, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.inner = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.frozen(self.embed(tokens)))
        return self.head(self.inner(hidden) * self.scale)


def batch() -> Tensor:
    return torch.arange(22) % 11


def loss_of(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(batch()), batch())


@dataclass
class Loop:
    """A model, its optimizers, and one step of both."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    step: Callable[[], Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.step = self.plain_step

    def plain_step(self) -> Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = loss_of(self.model)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for _, parameter in named_tensors(model)]


def adamw() -> Loop:
    model = Net()
    return Loop(model, [AdamW(trainable(model), lr=1e-2)])


def muon_and_adamw() -> Loop:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this torch has no Muon")
    model = Net()
    others = [p for p in trainable(model) if p is not model.inner.weight]
    return Loop(model, [torch.optim.Muon([model.inner.weight], lr=1e-2), AdamW(others, lr=1e-2)])


def adafactor() -> Loop:
    model = Net()
    return Loop(model, [torch.optim.Adafactor(trainable(model), lr=1e-2)])


def lbfgs() -> Loop:
    model = Net()
    optimizer = LBFGS(trainable(model), lr=0.1, max_iter=3)
    loop = Loop(model, [optimizer])

    def step() -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        return optimizer.step(closure)

    loop.step = step
    return loop


def autocast() -> Loop:
    loop = adamw()

    def step() -> Tensor:
        with torch.autocast(batch().device.type, dtype=torch.bfloat16):
            loss = loss_of(loop.model)
        loss.backward()
        loop.optimizers[0].step()
        loop.optimizers[0].zero_grad()
        return loss

    loop.step = step
    return loop


def scaler_that_skips() -> Loop:
    """The first steps overflow, and the scaler leaves them out; their loss is infinite."""
    loop = adamw()
    scaler = torch.amp.GradScaler(batch().device.type, init_scale=2.0**127, growth_interval=1000)
    loop.skipped = 0  # type: ignore[attr-defined]

    def step() -> Tensor:
        loss = loss_of(loop.model)
        scaler.scale(loss * 4).backward()
        before = scaler.get_scale()
        scaler.step(loop.optimizers[0])
        scaler.update()
        loop.optimizers[0].zero_grad()
        is_skipped = scaler.get_scale() < before
        loop.skipped += is_skipped  # type: ignore[attr-defined]
        return torch.tensor(torch.inf) if is_skipped else loss

    loop.step = step
    return loop


def compiled() -> Loop:
    loop = adamw()
    loop.model = torch.compile(loop.model, backend="eager")  # type: ignore[assignment]
    return loop


def bfloat16() -> Loop:
    model = Net().to(torch.bfloat16)
    return Loop(model, [AdamW(trainable(model), lr=1e-2)])


def float64() -> Loop:
    model = Net().double()
    return Loop(model, [AdamW(trainable(model), lr=1e-2)])


LOOPS = [
    adamw,
    muon_and_adamw,
    adafactor,
    lbfgs,
    autocast,
    scaler_that_skips,
    pytest.param(compiled, marks=pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")),
    bfloat16,
    float64,
]


def manifest_for(model: nn.Module) -> Manifest:
    manifest = describe(model, name="t", codec="int8", every_steps=EVERY, fragments=1)
    pace = manifest.pace.model_copy(update={"min_round_seconds": 1e-6})
    outer = manifest.outer.model_copy(update={"learning_rate": 1.0, "momentum": 0.0})
    return manifest.model_copy(update={"pace": pace, "outer": outer})


@pytest.mark.usefixtures("on_each_device")
@pytest.mark.parametrize("make", LOOPS)
async def test_it_trains_publishes_applies_and_resumes(
    make: Callable[[], Loop], tmp_path: Path, seed: int
) -> None:
    await trains_publishes_applies_and_resumes(make, tmp_path, seed)


@pytest.mark.usefixtures("like_a_gpu")
@pytest.mark.parametrize("make", [adamw, bfloat16])
async def test_it_does_so_as_on_a_gpu(make: Callable[[], Loop], tmp_path: Path, seed: int) -> None:
    await trains_publishes_applies_and_resumes(make, tmp_path, seed)


async def trains_publishes_applies_and_resumes(make: Callable[[], Loop], tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    loop = make()
    manifest = manifest_for(loop.model)
    phi = parameters(loop.model, manifest.plan())
    frozen = copy.deepcopy(dict(loop.model.named_buffers()))
    async with daemon_at(tmp_path, manifest) as daemon, link_to(daemon) as link:
        peer = leading(loop.model, loop.optimizers, manifest, link, tmp_path / "c")
        await daemon.offer(0, phi, merged=0, own=0, version=1)
        assert await asyncio.to_thread(peer.begin)
        assert not peer.resumed
        rounds = []
        for _ in range(EVERY):
            loss = loop.step()
            rounds.append(peer.step(tokens=22, loss=loss))
        assert rounds == [None] * (EVERY - 1) + [1]
        assert np.isfinite(peer.last_loss)
        assert getattr(loop, "skipped", 1), "a scaler has skipped"
        await until(lambda: 1 in daemon.signed)
        await until(lambda: daemon.port.is_free(0))
        newer = phi + (1 << 20)
        await daemon.offer(0, newer, merged=1, own=1, version=2)
        await until(lambda: link._offers)
        done = EVERY
        while peer.version < 2:
            assert done < EVERY + 2
            loop.step()
            peer.step(tokens=22, loss=1.0)
            done += 1
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # what was on its way there has come
        peer.drop_progress()
        held = torch.cat([p.detach().double().reshape(-1) for p in trainable(loop.model)]).cpu().numpy()
        in_order = {slot.spec.name: slot.span for slot in manifest.plan().fragments[0].slots}
        wanted = np.concatenate([newer[in_order[name]] / ONE for name, _ in named_tensors(loop.model)])
        coarse = any(p.dtype == torch.bfloat16 for p in trainable(loop.model))
        assert np.allclose(held, wanted, rtol=2**-8 if coarse else 0, atol=1e-3 if coarse else 1e-6)
        await asyncio.to_thread(peer._role.flush, 60)
        buffers = dict(loop.model.named_buffers())
        changed = [name for name in buffers if not torch.equal(buffers[name], frozen[name])]
        assert any("running_mean" in name for name in changed), "statistics are this node's own"

    again = make()
    async with daemon_at(tmp_path, manifest) as daemon, link_to(daemon) as link:
        peer = leading(again.model, again.optimizers, manifest, link, tmp_path / "c")
        await daemon.offer(0, newer, merged=1, own=1, version=1)
        assert await asyncio.to_thread(peer.begin)
        assert peer.resumed
        assert peer.progress.steps == done
        assert again.step().isfinite() or make is scaler_that_skips


def more() -> nn.Module:
    model = nn.Linear(4, 4)
    model.extra = nn.Parameter(torch.zeros(2, 3))
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.Linear(4, 5), r"'weight' has shape \[5, 4\]; the manifest says \[4, 4\]"),
        (lambda: nn.Linear(4, 4, bias=False), r"no tensor 'bias' of shape \[4\]"),
        (lambda: nn.Linear(4, 4, dtype=torch.complex64), r"'weight' is torch\.complex64"),
        (lambda: nn.Linear(4, 4, device="meta"), r"'weight' has no values yet"),
        (lambda: nn.LazyLinear(4), r"'weight' has no values yet"),
        (more, r"trains tensor 'extra' of shape \[2, 3\]"),
        (lambda: nn.Sequential(nn.Linear(4, 4)), r"no tensor 'weight' of shape \[4, 4\]"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_model_that_does_not_fit_is_told_where(make: Callable[[], nn.Module], message: str) -> None:
    manifest = manifest_for(nn.Linear(4, 4))
    with pytest.raises(ConfigError, match=message):
        OuterLoop(dict(named_tensors(make())), manifest)
