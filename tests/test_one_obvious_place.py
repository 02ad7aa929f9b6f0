"""A codec, a merge rule and an outer optimizer are each one file and a row of a table.

Here they are added from outside the packages, and a swarm of two cores and two outer loops trains with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from gossamer.models.task import named_tensors
from gossamer.node.trainer.outer import OuterLoop
from gossamer.node.trainer.outer_optimizers import OPTIMIZERS
from gossamer.protocol import events as ev
from gossamer.protocol import manifest as manifests
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.codecs.base import Dense, OuterDefaults
from gossamer.protocol.fixedpoint import Ints, to_fixed
from gossamer.protocol.manifest import Manifest, Outer
from gossamer.protocol.merge.merge import merge_round
from gossamer.protocol.payloads import TensorSpec, payload_length, split_payload
from gossamer.protocol.rules import RULES, Deltas
from gossamer.protocol.rules.base import Step, combine, scaled
from tests.protocol import builders
from tests.protocol.wiring import Node, World

ROUNDS = 12


class Coarse(Dense):
    """A codec: 16 bits of each value, in steps of 2**-14."""

    name = "coarse"
    outer = outer_by_mean = OuterDefaults(0.7, 0.5, 1.0)

    def section_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: Ints) -> bytes:
        levels = np.clip((values.reshape(-1) + 512) >> 10, -32768, 32767)
        return levels.astype("<i2").tobytes()

    def decode(self, section: memoryview, numel: int, start: int = 0, stop: int | None = None) -> Ints:
        levels = np.frombuffer(section, dtype="<i2")[start:stop]
        return levels.astype(np.int32) << 10


def heaviest(deltas: Deltas) -> Iterator[Step]:
    """A merge rule: the delta with the greatest weight counts alone."""
    first = max(range(len(deltas.weights)), key=deltas.weights.__getitem__)
    return scaled(combine(deltas, [int(i == first) for i in range(len(deltas.weights))]), 1.0)


class HeavyBall:
    """An outer optimizer: momentum without Nesterov's look ahead."""

    buffers = ("velocity",)

    def __init__(self, manifest: Manifest) -> None:
        self._mu = manifest.outer.momentum

    def step(self, progress: Tensor, *buffers: Tensor, windows: float) -> None:
        progress.copy_(buffers[0].mul_(self._mu).add_(progress))


@pytest.fixture
def additions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(CODECS, "coarse", Coarse())
    monkeypatch.setitem(RULES, "heaviest", heaviest)
    monkeypatch.setitem(OPTIMIZERS, "heavy-ball", HeavyBall)
    manifests.OUTER_OPTIMIZERS.add("heavy-ball")
    yield
    manifests.OUTER_OPTIMIZERS.discard("heavy-ball")


class Trainer:
    """A model that learns a line, its outer loop, and the core of its node."""

    def __init__(self, node: Node, manifest: Manifest) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(6, 1)
        self.loop = OuterLoop(dict(named_tensors(self.model)), manifest)
        self.node, self.manifest = node, manifest
        parameters = [p.detach().numpy().reshape(-1) for _, p in named_tensors(self.model)]
        self.first: Ints = to_fixed(np.concatenate(parameters))
        self.loop.apply(0, self.first, 0, keep_progress=False)

    def train(self, generator: torch.Generator) -> float:
        """One window of plain SGD; returns the last loss."""
        loss = torch.zeros(())
        for _ in range(5):
            inputs = torch.randn(16, 6, generator=generator)
            loss = (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            self.model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in self.model.parameters():
                    assert parameter.grad is not None
                    parameter.sub_(0.05 * parameter.grad)
            self.loop.step(16, loss)
        return float(loss.detach())

    def publish(self, world: World, round_: int) -> None:
        (fragment,) = self.manifest.plan().fragments
        area = memoryview(bytearray(payload_length(CODECS["coarse"], fragment)))
        length, window = self.loop.publish(0, round_, area)
        payload = bytes(area[:length])
        for chunk in split_payload(payload):
            self.node.blobs[sha256(chunk).digest()] = bytes(chunk)
        body = builders.body_of(payload, "coarse", round_, 1, steps=window.steps, tokens=window.tokens)
        world.handle(self.node, ev.Publish(body))

    def phi(self) -> Ints:
        """The swarm's model, as this node's records define it."""
        phi, core = self.first.copy(), self.node.core
        for round_ in sorted({delta.round for delta in core.ledger}):
            contributions = [
                builders.contribution(
                    delta, b"".join(self.node.blobs[c] for c in delta.body.chunks), core.layout
                )
                for delta in core.ledger.valid(round_)
            ]
            phi -= merge_round(contributions, core.layout.fragments[0], self.manifest.outer)
        return phi


def test_a_codec_a_rule_and_an_outer_optimizer_from_outside_train_a_swarm(additions: None) -> None:
    tensors = (TensorSpec("weight", (1, 6), "heaviest"), TensorSpec("bias", (1,), "heaviest"))
    outer = builders.one_rung("coarse", optimizer="heavy-ball", learning_rate=0.7, momentum=0.3)
    manifest = builders.manifest(tensors, fragments=1, outer=outer)
    world = World(seed=3, manifest=manifest)
    trainers = [Trainer(world.add(0), manifest), Trainer(world.add(1, bootstrap=[0]), manifest)]
    world.run(5.0)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for round_ in range(1, ROUNDS + 1):
        losses.append([trainer.train(generator) for trainer in trainers])
        for trainer in trainers:
            trainer.publish(world, round_)
        world.run(3.0)
        one, other = (trainer.phi() for trainer in trainers)
        assert one.tobytes() == other.tobytes(), "the same records, the same bits"
        for trainer in trainers:
            trainer.loop.apply(0, one, round_)
    assert all(len(list(trainer.node.core.ledger)) == 2 * ROUNDS for trainer in trainers)
    assert max(losses[-1]) < 0.1 * min(losses[0])
    assert trainers[0].loop.fragments[0].saved["velocity"][0].any()


def test_every_outer_optimizer_can_be_named_in_a_manifest() -> None:
    assert set(OPTIMIZERS) == manifests.OUTER_OPTIMIZERS
    with pytest.raises(ValueError, match="'adam' is unknown; choose one of nesterov"):
        Outer(optimizer="adam")
