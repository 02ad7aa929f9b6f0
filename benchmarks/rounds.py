"""A swarm without a network: real outer loops, encoders and Merge, one worker after another.

All deltas of a round are there before the next window begins, so this measures only the averaging rules.
Hostile workers train like the others and lie about the result.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from gossamer.bootstrap import manifests
from gossamer.bootstrap.manifests import outer_defaults
from gossamer.models.corpus import Corpus
from gossamer.models.muon import InnerOptimizer
from gossamer.models.task import DataStream, Task, named_tensors
from gossamer.models.text import ByteTextTask, TextOptions
from gossamer.node.trainer.outer import OuterLoop
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.errors import DivergedError
from gossamer.protocol.fixedpoint import VALUE_LIMIT, Ints, is_healthy
from gossamer.protocol.manifest import Manifest, Rung
from gossamer.protocol.merge.merge import Contribution, RoundMerge, measure
from gossamer.protocol.payloads import Payload, encode_payload, payload_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is trained. `context` and `batch_size` are those of one inner step."""

    workers: int = 8
    windows: int = 30
    steps: int = 20
    context: int = 64
    batch_size: int = 8
    eval_batches: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Lie:
    """The factors by which a hostile worker multiplies values in its record."""

    factor: float = 1.0
    """Factor for every value of its delta."""
    tokens: int = 1
    steps: int = 1


@dataclass(slots=True)
class Worker:
    """One member: its model, optimizer, data and outer loop."""

    author: bytes
    model: nn.Module
    optimizer: InnerOptimizer
    batches: Iterator[object]
    outer: OuterLoop
    task: Task
    steps: int
    """Inner steps per window."""
    lie: Lie | None = None


@dataclass(slots=True)
class Swarm:
    """Workers that train one model round by round."""

    scale: Scale
    manifest: Manifest
    phi: Ints
    workers: list[Worker] = field(default_factory=list)

    def round(self, number: int) -> RoundMerge:
        """Train a window on every worker and merge the deltas; returns the merge. Raises DivergedError."""
        fragment = self.manifest.plan().of_round(number)
        merge = RoundMerge(
            [self._contribution(worker, number) for worker in self.workers], fragment, self.manifest.outer
        )
        for index, slot in enumerate(fragment.slots):
            merge.subtract(index, self.phi[slot.span])
        if not is_healthy(self.phi):
            raise DivergedError("Phi reached a magnitude of 64")
        for worker in self.workers:
            worker.outer.apply(fragment.index, self.phi, number)
        return merge

    def _contribution(self, worker: Worker, number: int) -> Contribution:
        for _ in range(worker.steps):
            batch = next(worker.batches)
            loss = worker.task.loss(worker.model, batch)
            worker.optimizer.zero_grad()
            loss.backward()
            worker.optimizer.step()
            worker.outer.step(worker.task.tokens(batch), loss)
        fragment, codec = self.manifest.plan().of_round(number), self.manifest.outer.codecs[0].name
        room = memoryview(bytearray(payload_length(CODECS[codec], fragment)))
        length, window = worker.outer.publish(fragment.index, number, room)
        payload = Payload(codec, fragment, room[:length])
        lie = worker.lie or Lie()
        if lie.factor != 1.0:
            told = [_times(payload.tensor(index), lie.factor) for index in range(payload.tensors)]
            payload = Payload(codec, fragment, encode_payload(codec, fragment, told))
        norms, sample = measure(payload)
        return Contribution(
            author=worker.author,
            tokens=window.tokens * lie.tokens,
            steps=window.steps * lie.steps,
            staleness=0,
            norms=norms,
            tensor=payload.section,
            sample=sample,
        )

    @torch.no_grad()
    def evaluate(self) -> float:
        """The held-out loss of Phi, nats per byte; infinite if it is not finite."""
        worker = self.workers[0]
        model = worker.task.build_model(0)
        OuterLoop(dict(named_tensors(model)), self.manifest).apply(0, self.phi, 1, keep_progress=False)
        loss = worker.task.evaluate(model)
        return loss if np.isfinite(loss) else float("inf")


def retuned(manifest: Manifest, settings: Mapping[str, float]) -> Manifest:
    """A manifest of one codec with other outer settings."""
    (rung,) = manifest.outer.codecs
    of_rung = settings.keys() & Rung.model_fields.keys()
    changed = {key: settings[key] for key in settings.keys() - of_rung}
    rung = rung.model_copy(update={key: settings[key] for key in of_rung})
    outer = manifest.outer.model_copy(update={**changed, "codecs": (rung,)})
    return manifest.model_copy(update={"outer": outer})


def _times(values: Ints, factor: float) -> Ints:
    return np.clip(np.rint(values * factor), 1 - VALUE_LIMIT, VALUE_LIMIT - 1).astype(np.int32)


def build(
    scale: Scale,
    *,
    averaging: str = "rda",
    outer: dict[str, float] | None = None,
    lies: Sequence[Lie] = (),
    seed: int = 0,
    texts: Sequence[Corpus] = (),
    speeds: Sequence[float] = (),
) -> Swarm:
    """A swarm whose first `len(lies)` workers are hostile.

    `texts` are the workers' own data, if they do not all use the default corpus. `speeds` are factors for the
    scale's steps, one for each worker, if they differ. Raises ConfigError.
    """
    options = {
        "preset": "tiny",
        "optimizer": "adamw",
        "context": scale.context,
        "batch_size": scale.batch_size,
        "eval_batches": scale.eval_batches,
    }
    manifest, phi = manifests.create(
        name="attacks",
        task="text",
        options=options,
        codec="int4",
        every_steps=scale.steps,
        every_seconds=0.0,
        fragments=1,
        seed=seed,
        averaging=averaging,
    )
    # The same settings under every rule, so that what differs is the rule.
    manifest = retuned(manifest, {**outer_defaults("int4"), **(outer or {})})
    swarm = Swarm(scale, manifest, phi)
    common = ByteTextTask(TextOptions(**options)).corpus
    for number in range(scale.workers):
        task = ByteTextTask(TextOptions(**options))
        task.corpus = texts[number] if texts else common
        model = task.build_model(seed)
        author = bytes([number]) * 32
        loop = OuterLoop(dict(named_tensors(model)), manifest)
        loop.apply(0, phi, 0, keep_progress=False)
        swarm.workers.append(
            Worker(
                author=author,
                model=model,
                optimizer=InnerOptimizer(task.build_optimizer(model)),
                batches=task.batches(DataStream(seed=seed, node_id=author)),
                outer=loop,
                task=task,
                steps=max(1, round(scale.steps * speeds[number])) if speeds else scale.steps,
                lie=lies[number] if number < len(lies) else None,
            )
        )
    return swarm
