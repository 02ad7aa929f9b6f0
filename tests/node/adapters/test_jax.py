"""`gossamer.node.adapters.jax`: what a JAX loop publishes and takes over, beside a PyTorch loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gossamer.bootstrap.manifests import describe
from gossamer.node.trainer.outer import Leader
from gossamer.node.trainer.ranks import RankContext
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.manifest import Manifest
from tests.node.leading import leading
from tests.node.trainer_side import FakeDaemon, daemon_at, link_to, until

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
jax.config.update("jax_num_cpu_devices", 2)

from gossamer.node.adapters.jax import HostModel, JaxPeer, _Devices, _places, _States, mapped  # noqa: E402

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


@contextlib.asynccontextmanager
async def begun(daemon: FakeDaemon, folder: Path, init: Any = None) -> AsyncIterator[JaxPeer]:
    """A peer that has begun, with zeros."""
    manifest = daemon.manifest
    async with link_to(daemon) as link:
        host = HostModel(tree(nn.Linear(30, 20)), _places(manifest.task.options))
        states = [] if init is None else [_States(init, host)]
        context = RankContext(_Devices(dict(host.named_parameters()), host))
        role = Leader(host, states, manifest, link, context, folder / "checkpoint")
        peer = JaxPeer(host, role, states)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_it_publishes_and_takes_over_the_bits_that_a_torch_loop_does(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """The same progress in both, from donated arrays on two devices."""
    torch.manual_seed(0)
    model = nn.Linear(30, 20, dtype=dtype)
    manifest, params = manifest_for(model), tree(model)
    more = jax.jit(lambda tree: jax.tree.map(lambda x: x + x.dtype.type(0.25), tree), donate_argnums=0)
    phi = np.arange(manifest.plan().numel, dtype=np.int32) << 12
    signed = []
    for is_torch in (True, False):
        folder = tmp_path / str(is_torch)
        folder.mkdir()
        async with daemon_at(folder, manifest) as daemon, link_to(daemon) as link:
            host = HostModel(params, _places(manifest.task.options))
            if is_torch:
                peer: Any = leading(model, [], manifest, link, folder / "c")
            else:
                context = RankContext(_Devices(dict(host.named_parameters()), host))
                peer = JaxPeer(host, Leader(host, [], manifest, link, context, folder / "c"))
            await daemon.offer(0, phi, merged=0, own=0, version=1)
            assert await asyncio.to_thread(peer.begin)
            params = host.params
            for _ in range(EVERY):
                if is_torch:
                    with torch.no_grad():
                        for parameter in model.parameters():
                            parameter.add_(0.25)
                    peer.step(tokens=10, loss=2.0)
                else:
                    params = peer.step(more(params), tokens=10, loss=jax.numpy.ones(()))
            await until(lambda daemon=daemon: 1 in daemon.signed)
            signed.append(daemon.signed[1])
            await until(lambda daemon=daemon: daemon.port.is_free(0))
            await daemon.offer(0, phi[::-1].copy(), merged=1, own=1, version=2)
            await until(lambda link=link: 0 in link._offers)
            if is_torch:
                peer.step(tokens=10, loss=2.0)
            else:
                params = peer.step(params, tokens=10, loss=2.0)
                assert peer.last_loss == 1.0
                assert jax.tree.map(lambda x: x.sharding, params) == jax.tree.map(
                    lambda x: x.sharding, tree(model)
                )
            await asyncio.to_thread(peer.close)
    assert signed[0] == signed[1]
    kernel = np.asarray(params["layer"]["kernel"]).astype(np.float32)
    assert np.array_equal(kernel.T, model.weight.detach().float().numpy())
    assert np.array_equal(np.asarray(params["layer"]["bias"]).astype(np.float32), model.bias.detach().float())


async def test_what_the_optimizer_learnt_is_resumed_unless_it_is_another(tmp_path: Path) -> None:
    adam = optax.adamw(1e-3)

    def trained(params: Any, state: Any) -> tuple[Any, Any]:
        updates, state = adam.update(jax.tree.map(lambda x: x + 1, params), state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(trained, donate_argnums=(0, 1))
    async with daemon_at(tmp_path, manifest_for(nn.Linear(30, 20))) as daemon:
        async with begun(daemon, tmp_path, adam.init) as peer:
            params, state = peer.params, peer.state
            for _ in range(2):
                params, state = peer.step(*step(params, state), tokens=10, loss=2.0)
            with pytest.raises(ValueError, match="has been donated"):
                taken = params
                step(params, state)
                peer.step(taken, state, tokens=10, loss=2.0)
            params, state = jax.tree.map(lambda x: x, (peer.params, peer.state))
        async with begun(daemon, tmp_path / "none", adam.init) as peer:
            params, state = peer.params, peer.state
            params, state = peer.step(*trained(params, state), tokens=10, loss=2.0)
            (tmp_path / "none").mkdir()
            await asyncio.to_thread(peer.leave)
        async with begun(daemon, tmp_path / "none", adam.init) as peer:
            assert peer.resumed and int(peer.state[0].count) == 1
            same = jax.tree.map(lambda a, b: bool((a == b).all()), peer.state, state)
            assert all(jax.tree.leaves(same))
        async with begun(daemon, tmp_path / "none", optax.sgd(1e-3, momentum=0.9).init) as peer:
            assert not peer.resumed and not any(float(abs(x).max()) for x in jax.tree.leaves(peer.state))


async def test_a_model_that_diverges_goes_on_from_the_swarms_with_a_fresh_state(tmp_path: Path) -> None:
    def spoilt(array: Any) -> Any:
        return array + array.dtype.type(np.inf if array.ndim else 1)

    manifest = manifest_for(nn.Linear(30, 20))
    async with (
        daemon_at(tmp_path, manifest) as daemon,
        begun(daemon, tmp_path, optax.adamw(1e-3).init) as peer,
    ):
        params, state = peer.params, peer.state
        for _ in range(EVERY):
            params, state = jax.tree.map(spoilt, (params, state))
            params, state = peer.step(params, state, tokens=10, loss=float("nan"))
        assert not daemon.signed
        await offer_zeros(daemon)
        while not np.isfinite(np.asarray(params["layer"]["kernel"])).all():
            params, state = peer.step(params, state, tokens=10, loss=1.0)
            await asyncio.sleep(0.01)
        assert all(float(abs(x).max()) == 0 for x in jax.tree.leaves((params, state)))


def test_arrays_have_the_names_of_their_paths_and_only_floats_can_be_trained() -> None:
    ones = jax.numpy.ones
    host = HostModel({"layers": [{"w": ones((2, 3), "bfloat16")}, {"w": ones(4)}], "scale": ones(())})
    assert [name for name, _ in host.named_parameters()] == ["layers.0.w", "layers.1.w", "scale"]
    assert describe(host, name="x").layout.tensors[0].shape == (2, 3)
    for wrong in ({"step": jax.numpy.zeros((), "int32")}, {"step": 1.0}):
        with pytest.raises(ConfigError, match="'step' in the tree is"):
            HostModel(wrong)
    with pytest.raises(ConfigError, match="taken, or with other axes"):
        HostModel({"w": ones((2, 3))}, {"w": ("weight", (0, 2))})
    with pytest.raises(ConfigError, match="give a tensor's name, and axes"):
        _places({"jax:w": "weight T"})
