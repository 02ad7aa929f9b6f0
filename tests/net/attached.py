"""A small training script with a `Peer` in it, which `test_attach.py` and `test_ranks.py` run as a process.

    python -m tests.net.attached '{"folder": ..., "manifest": ..., ...}'

It trains until a file ``stop`` appears beside its folder, finishes with the swarm's own model, and writes
what it then holds to FOLDER.RANK.json. It prints a line per step for the test to read.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from gossamer.models.task import named_tensors
from gossamer.node.trainer.peer import Peer

FEATURES = 12
WIDTH = 12_000
"""So wide that the first layer's weights are in both fragments."""


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def digest(model: nn.Module) -> str:
    """The digest of all parameters' bytes, gathered where they are sharded."""
    hashed = sha256()
    for _, parameter in named_tensors(model):
        tensor = parameter.detach()
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        hashed.update(full.cpu().numpy().tobytes())
    return hashed.hexdigest()


def train(options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank, how = int(os.environ.get("RANK", "0")), options.get("how", "alone")
    model = build_model()
    if how != "alone":
        dist.init_process_group("gloo")
    if how == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif how == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    folder = Path(options["folder"])
    stop = folder.parent / "stop"
    merged: list[int] = []
    rounds: list[int | None] = []
    losses: list[float] = []
    peer = Peer.attach(
        model,
        optimizer,
        manifest=options.get("manifest"),
        join=options.get("join", []),
        invite=options.get("invite"),
        folder=folder,
        listen="127.0.0.1:0",
        name=folder.name,
    )
    with peer:
        peer.on_merged(lambda peer: merged.append(peer.version))
        own = 0 if how == "alike" else rank
        generator = torch.Generator().manual_seed(int.from_bytes(peer.node_id[:6], "big") + own)
        drawn = open(f"{folder}.{rank}.drawn", "a")  # noqa: SIM115 - it ends with the process
        batches = batches_of(peer, options) if "samples" in options else None
        while not (stop.exists() if how in ("alone", "alike") else _any(stop.exists())):
            if peer.should_stop and not options.get("stubborn"):
                break
            inputs = torch.randn(16, FEATURES, generator=generator)
            if batches is not None:
                print(*next(batches).tolist(), file=drawn, flush=True)
            loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rounds.append(peer.step(tokens=len(inputs), loss=loss))
            losses.append(peer.last_loss)
            if peer.round == options.get("leaves_at") and rank == dist.get_world_size() - 1:
                if not options.get("politely"):
                    break
                peer.request_stop()
            if rank == 0:
                print(json.dumps(peer.metrics()), flush=True)
            time.sleep(options.get("pause", 0.005))
        rests = peer.finish(quiet_s=3.0, timeout_s=40.0)
        held = digest(model)
        with peer.average():
            average = digest(model)
        assert digest(model) == held
        result = {
            "rests": rests,
            "digest": held,
            "average": average,
            "merged": merged,
            "rounds": rounds,
            "losses": losses,
            "metrics": peer.metrics(),
            "node_id": peer.node_id.hex(),
        }
        Path(f"{folder}.{rank}.json").write_text(json.dumps(result))
    if how != "alone":
        dist.destroy_process_group()


def batches_of(peer: Peer, options: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Which samples to train on, in batches, as a loader with workers brings them."""
    dataset = torch.arange(options["samples"])
    workers = options.get("workers", 0)
    loader = DataLoader(dataset, 16, sampler=peer.shard(dataset), num_workers=workers)  # type: ignore[arg-type]
    while True:
        yield from loader


def _any(flag: bool) -> bool:
    """Whether any rank's flag is set: all ranks must leave their loops at the same step."""
    flags = torch.tensor([float(flag)])
    dist.all_reduce(flags)
    return bool(flags.item())


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
