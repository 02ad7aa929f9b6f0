"""JAX loops on a daemon in this process, for `test_jax`. It is a module of its own since importing JAX takes
seconds, in every process that collects tests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from torch import nn

from gossamer.bootstrap.manifests import describe
from gossamer.node.adapters.jax import HostModel, JaxPeer, _Devices, _places, _States, mapped
from gossamer.node.trainer.daemon_link import DaemonLink
from gossamer.node.trainer.outer import Leader
from gossamer.node.trainer.ranks import RankContext
from gossamer.protocol.manifest import Manifest
from tests.node.trainer_side import FakeDaemon, link_to, until

__all__ = ["HostModel", "optax"]

jax.config.update("jax_num_cpu_devices", 2)

EVERY = 4
NAMES = {"layer.kernel": "weight 1 0", "layer.bias": "bias"}


def tree(model: nn.Linear) -> dict[str, Any]:
    """A layer as JAX has it: the matrix transposed, and split between two devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    weight, bias = (p.detach().float().numpy().T for p in (model.weight, model.bias))
    dtype = str(model.weight.dtype).removeprefix("torch.")
    kernel = jax.device_put(jax.numpy.array(weight, dtype), split)
    return {"layer": {"kernel": kernel, "bias": jax.device_put(jax.numpy.array(bias, dtype), whole)}}


def manifest_for(model: nn.Linear) -> Manifest:
    manifest = describe(model, name="both", every_steps=EVERY, fragments=1, options=mapped(NAMES))
    pace = manifest.pace.model_copy(update={"min_round_seconds": 1e-6})
    return manifest.model_copy(update={"pace": pace})


def leading(params: Any, manifest: Manifest, link: DaemonLink, checkpoint: Path, init: Any = None) -> JaxPeer:
    """A peer on a link that a test has made, as `JaxPeer.attach` makes one."""
    host = HostModel(params, _places(manifest.task.options))
    states = [] if init is None else [_States(init, host)]
    context = RankContext(_Devices(dict(host.named_parameters()), host))
    return JaxPeer(host, Leader(host, states, manifest, link, context, checkpoint), states)


@contextlib.asynccontextmanager
async def begun(daemon: FakeDaemon, folder: Path, init: Any = None) -> AsyncIterator[JaxPeer]:
    """A peer that has begun, with zeros."""
    async with link_to(daemon) as link:
        peer = leading(tree(nn.Linear(30, 20)), daemon.manifest, link, folder / "checkpoint", init)
        await offer_zeros(daemon)
        assert await asyncio.to_thread(peer.begin)
        if peer._states is not None:
            peer._states.begin(peer.params, resumed=peer.resumed)
        try:
            yield peer
        finally:
            await asyncio.to_thread(peer.close)


async def offer_zeros(daemon: FakeDaemon, own: int = 0) -> None:
    zeros = np.zeros(daemon.manifest.plan().numel, dtype=np.int32)
    await until(lambda: daemon.port.is_free(0))
    await daemon.offer(0, zeros, merged=own, own=own, version=1)
