"""One host's part of the contest of `lines`: trains by DDP over gloo, or as a peer of a swarm.

It is started as ``python -m benchmarks.contender JSON`` on every host. Task, first parameters, data,
optimizer and evaluation are the same either way. The first host evaluates every few steps, writes the curve,
and ends the contest, unless another process does both. Time counts from when all hosts are ready.
"""

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gossamer.models.muon import InnerOptimizer
from gossamer.models.registry import build_task
from gossamer.models.task import DataStream, Task
from gossamer.node import Peer

POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The options that a contender is started with."""

    way: str
    """How it trains: ddp or swarm."""
    rank: int
    hosts: int
    folder: str
    """A folder that all hosts see: by files in it they tell each other to begin and to stop."""
    options: dict[str, Any]
    """Options of the task `text`."""
    address: str
    """This host's address, host:port."""
    first: str
    """The first host's address."""
    cable: str
    """The name of this host's network interface."""
    evaluate_every: int = 0
    """Steps; if 0, another process evaluates, and ends the contest by writing the file `stop`."""
    target: float = 0.0
    max_steps: int = 0
    max_seconds: float = 0.0
    step_s: float = 0.0
    """How long a step takes at least. A host that is late makes up for it in the steps that follow."""

    @property
    def stop(self) -> Path:
        return Path(self.folder) / "stop"


class Way(ABC):
    """How hosts train one model together."""

    @abstractmethod
    def stepped(self, tokens: int, loss: torch.Tensor) -> None:
        """Called after each step of the optimizer."""

    @abstractmethod
    def must_stop(self, stops: bool) -> bool:
        """Whether all hosts end now, which the first host decides by its own `stops`."""

    @abstractmethod
    def close(self) -> None: ...


class Ddp(Way):
    """The conventional way: gradients are averaged over all hosts at every step."""

    def __init__(self, entry: Entry, model: nn.Module) -> None:
        dist.init_process_group("gloo", rank=entry.rank, world_size=entry.hosts)
        self.model = nn.parallel.DistributedDataParallel(model)

    def stepped(self, tokens: int, loss: torch.Tensor) -> None:
        pass

    def must_stop(self, stops: bool) -> bool:
        word = torch.tensor([float(stops)])
        dist.broadcast(word, 0)
        return bool(word)

    def close(self) -> None:
        dist.destroy_process_group()


class Swarm(Way):
    """Deltas spread by gossip, and no host waits."""

    def __init__(self, entry: Entry, model: nn.Module, optimizer: InnerOptimizer) -> None:
        self._entry = entry
        self.model = model
        folder = Path(entry.folder)
        self._peer = Peer.attach(
            model,
            optimizer.parts,
            manifest=folder / "swarm.toml",
            join=[entry.first] if entry.rank else [],
            folder=folder / f"node{entry.rank}",
            listen=entry.address,
            name=f"host{entry.rank}",
        )

    def stepped(self, tokens: int, loss: torch.Tensor) -> None:
        self._peer.step(tokens, loss)

    def must_stop(self, stops: bool) -> bool:
        return stops or self._entry.stop.exists()

    def close(self) -> None:
        self._peer.leave()


def _bytes_sent(cable: str) -> int:
    """Bytes that this host has sent over its cable so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == cable:
            return int(counts.split()[8])
    raise LookupError(cable)


def _wait_for_all(entry: Entry) -> None:
    folder = Path(entry.folder)
    (folder / f"ready{entry.rank}").touch()
    while len(list(folder.glob("ready*"))) < entry.hosts:
        time.sleep(POLL_S)


class Contest:
    """One host's run."""

    def __init__(self, entry: Entry) -> None:
        self._entry = entry
        self._task: Task = build_task("text", entry.options, ())
        self._plain = self._task.build_model(0)
        self._optimizer = InnerOptimizer(self._task.build_optimizer(self._plain))
        if entry.way == "ddp":
            self._way: Ddp | Swarm = Ddp(entry, self._plain)
        else:
            self._way = Swarm(entry, self._plain, self._optimizer)

    def run(self) -> None:
        """Train until the first host has reached the target, or the time is up."""
        entry = self._entry
        batches = self._task.batches(DataStream(seed=0, node_id=bytes([entry.rank])))
        batch = next(batches)
        _wait_for_all(entry)
        begun, sent = time.monotonic(), _bytes_sent(entry.cable)
        curve: list[tuple[float, int, float]] = []
        steps = 0
        while True:
            self._step(batch)
            steps += 1
            stops = False
            if entry.rank == 0 and entry.evaluate_every and steps % entry.evaluate_every == 0:
                loss = self._task.evaluate(self._plain)
                seconds = time.monotonic() - begun
                curve.append((seconds, steps, loss))
                stops = loss <= entry.target or steps >= entry.max_steps or seconds >= entry.max_seconds
            # With DDP all hosts must stop at the same step.
            if (entry.way == "swarm" or steps % entry.evaluate_every == 0) and self._way.must_stop(stops):
                break
            time.sleep(max(0.0, begun + steps * entry.step_s - time.monotonic()))
            batch = next(batches)
        if entry.rank == 0:
            result = {
                "curve": curve,
                "steps": steps,
                "seconds": time.monotonic() - begun,
                "bytes_sent": _bytes_sent(entry.cable) - sent,
                "parameters": sum(p.numel() for p in self._plain.parameters()),
            }
            (Path(entry.folder) / "result.json").write_text(json.dumps(result))
            entry.stop.touch()
        self._way.close()

    def _step(self, batch: Any) -> None:
        loss = self._task.loss(self._way.model, batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._way.stepped(self._task.tokens(batch), loss.detach())


def describe(entry: Entry) -> str:
    """The one argument of the command line: the entry as JSON."""
    return json.dumps(asdict(entry))


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    Contest(Entry(**json.loads(sys.argv[1]))).run()
