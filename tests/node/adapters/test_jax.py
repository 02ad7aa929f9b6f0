"""`gossamer.node.adapters.jax`: what a JAX loop publishes and takes over, beside a PyTorch loop."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gossamer.bootstrap.manifests import describe
from gossamer.protocol.errors import ConfigError
from tests.node.leading import leading
from tests.node.trainer_side import daemon_at, link_to, until


@pytest.fixture(scope="module")
def loops() -> ModuleType:
    """Imported where a test wants it."""
    pytest.importorskip("optax")
    return importlib.import_module("tests.node.adapters.jax_loops")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_it_publishes_and_takes_over_the_bits_that_a_torch_loop_does(
    loops: ModuleType, tmp_path: Path, dtype: torch.dtype
) -> None:
    """The same progress in both, from donated arrays on two devices."""
    jax, tree, every = loops.jax, loops.tree, loops.EVERY
    torch.manual_seed(0)
    model = nn.Linear(30, 20, dtype=dtype)
    manifest, params = loops.manifest_for(model), tree(model)
    more = jax.jit(lambda tree: jax.tree.map(lambda x: x + x.dtype.type(0.25), tree), donate_argnums=0)
    phi = np.arange(manifest.plan().numel, dtype=np.int32) << 12
    signed = []
    for is_torch in (True, False):
        folder = tmp_path / str(is_torch)
        folder.mkdir()
        async with daemon_at(folder, manifest) as daemon, link_to(daemon) as link:
            peer: Any
            if is_torch:
                peer = leading(model, [], manifest, link, folder / "c")
            else:
                peer = loops.leading(params, manifest, link, folder / "c")
            await daemon.offer(0, phi, merged=0, own=0, version=1)
            assert await asyncio.to_thread(peer.begin)
            params = params if is_torch else peer.params
            for _ in range(every):
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


async def test_what_the_optimizer_learnt_is_resumed_unless_it_is_another(
    loops: ModuleType, tmp_path: Path
) -> None:
    jax, optax, begun = loops.jax, loops.optax, loops.begun
    adam = optax.adamw(1e-3)

    def trained(params: Any, state: Any) -> tuple[Any, Any]:
        updates, state = adam.update(jax.tree.map(lambda x: x + 1, params), state, params)
        return optax.apply_updates(params, updates), state

    step = jax.jit(trained, donate_argnums=(0, 1))
    async with daemon_at(tmp_path, loops.manifest_for(nn.Linear(30, 20))) as daemon:
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


async def test_a_step_that_is_cut_short_costs_the_optimizers_state_and_no_more(
    loops: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C in a step to which all was donated: the parameters are the swarm's again, the rest is saved."""
    step = loops.jax.jit(lambda *trees: loops.jax.tree.map(lambda x: x + 1, trees), donate_argnums=(0, 1))
    adam = loops.optax.adamw(1e-3)
    async with daemon_at(tmp_path, loops.manifest_for(nn.Linear(30, 20))) as daemon:
        async with loops.begun(daemon, tmp_path / "none", adam.init) as peer:
            (tmp_path / "none").mkdir()
            params, state = peer.step(*step(peer.params, peer.state), tokens=10, loss=2.0)
            step(params, state)
            await asyncio.to_thread(peer.finish, quiet_s=0.0)
            await asyncio.to_thread(peer.leave)
        assert "inner optimizer's state cannot be saved" in caplog.text
        assert "cannot save the trainer's state" not in caplog.text
        async with loops.begun(daemon, tmp_path / "none", adam.init) as peer:
            assert peer.progress.steps == 1 and not peer.resumed


async def test_a_model_that_diverges_goes_on_from_the_swarms_with_a_fresh_state(
    loops: ModuleType, tmp_path: Path
) -> None:
    jax = loops.jax

    def spoilt(array: Any) -> Any:
        return array + array.dtype.type(np.inf if array.ndim else 1)

    manifest = loops.manifest_for(nn.Linear(30, 20))
    async with (
        daemon_at(tmp_path, manifest) as daemon,
        loops.begun(daemon, tmp_path, loops.optax.adamw(1e-3).init) as peer,
    ):
        params, state = peer.params, peer.state
        for _ in range(loops.EVERY):
            params, state = jax.tree.map(spoilt, (params, state))
            params, state = peer.step(params, state, tokens=10, loss=float("nan"))
        assert not daemon.signed
        await loops.offer_zeros(daemon)
        while not np.isfinite(np.asarray(params["layer"]["kernel"])).all():
            params, state = peer.step(params, state, tokens=10, loss=1.0)
            await asyncio.sleep(0.01)
        assert all(float(abs(x).max()) == 0 for x in jax.tree.leaves((params, state)))


def test_arrays_have_the_names_of_their_paths_and_only_floats_can_be_trained(loops: ModuleType) -> None:
    jax, HostModel = loops.jax, loops.HostModel
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
        loops._places({"jax:w": "weight T"})
