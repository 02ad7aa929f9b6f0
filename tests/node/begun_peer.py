"""A peer that has begun, its model, and its daemon in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from gossamer.models.task import named_tensors
from gossamer.node.trainer.checkpoint import _Saved
from gossamer.node.trainer.daemon_link import DaemonLink
from gossamer.node.trainer.peer import Peer
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payloads import TensorSpec
from tests.node.leading import leading
from tests.node.trainer_side import FakeDaemon, daemon_at, link_to, until
from tests.protocol.builders import manifest as build_manifest

EVERY = 4


def saved_in(checkpoint: Path) -> tuple[int, bool]:
    """The steps that a checkpoint counts, and whether it holds the inner optimizer's state."""
    with open(checkpoint, "rb") as file:
        saved = _Saved(file)
    return saved.progress.steps, bool(saved.inner)


def manifest_for(model: nn.Module, fragments: int = 1) -> Manifest:
    specs = tuple(TensorSpec(n, tuple(p.shape), "mean") for n, p in named_tensors(model))
    pace = {"every_steps": EVERY, "min_round_seconds": 1e-6}
    return build_manifest(specs, fragments, pace=pace)


class Setup:
    """A peer that has begun, its model and its daemon."""

    def __init__(
        self,
        daemon: FakeDaemon,
        link: DaemonLink,
        peer: Peer,
        model: nn.Linear,
        optimizer: torch.optim.Optimizer,
        phi: Ints,
    ) -> None:
        self.daemon = daemon
        self.link = link
        self.peer = peer
        self.model = model
        self.optimizer = optimizer
        self.phi = phi

    def step(self, loss: float | torch.Tensor = 2.0) -> int | None:
        """Make one inner step, which moves every weight by a thousandth."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.001)
        return self.peer.step(tokens=10, loss=loss)

    async def offer(self, index: int, version: int) -> None:
        """Make the daemon offer a fragment that nobody has changed."""
        fragment = self.daemon.manifest.plan().fragments[index]
        await until(lambda: self.daemon.port.is_free(index))
        part = self.phi[fragment.offset : fragment.offset + fragment.numel]
        await self.daemon.offer(index, part, merged=0, own=0, version=version)
        await until(lambda: index in self.link._offers)

    def weights(self) -> np.ndarray:
        parts = [p.detach().double().reshape(-1) for _, p in named_tensors(self.model)]
        return torch.cat(parts).numpy()


@contextlib.asynccontextmanager
async def begun(
    folder: Path,
    stop_round: int = 0,
    checkpoint: str = "c",
    fragments: int = 1,
    dtype: torch.dtype = torch.float32,
    extra_stop_s: float = 0.0,
) -> AsyncIterator[Setup]:
    model = nn.Linear(30, 20, dtype=dtype)
    manifest = manifest_for(model, fragments)
    optimizer = torch.optim.AdamW(model.parameters())
    async with daemon_at(folder, manifest) as daemon, link_to(daemon) as link:
        peer = leading(model, [optimizer], manifest, link, folder / checkpoint, stop_round, extra_stop_s)
        phi = np.arange(manifest.plan().numel, dtype=np.int32) << 12
        for fragment in manifest.plan().fragments:
            part = phi[fragment.offset : fragment.offset + fragment.numel]
            await daemon.offer(fragment.index, part, merged=0, own=0, version=1)
        assert await asyncio.to_thread(peer.begin)
        try:
            yield Setup(daemon, link, peer, model, optimizer, phi)
        finally:
            await asyncio.to_thread(peer.close)
