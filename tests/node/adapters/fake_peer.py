"""A peer without a swarm, which records what an adapter tells it."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gossamer.node.trainer.data import Schedule
from gossamer.node.trainer.peer import Peer
from gossamer.protocol.errors import StorageError


class FakePeer:
    """Stands in for what `Peer.attach` returns."""

    finished = False

    def __init__(self, model: nn.Module, optimizers: Any, *, folder: Path | None, stop_after: int) -> None:
        self.model = model
        self.optimizers = optimizers
        self.folder = folder
        self.steps: list[tuple[int, float]] = []
        """Tokens and loss of each step."""
        self.rates: list[float] = []
        """The learning rate of each step."""
        self.ends: list[str] = []
        self.left_with: list[Tensor] = []
        """The parameters as they were when `finish` was called."""
        self.averages = 0
        """How often the average was asked for."""
        self._stop_after = stop_after

    @property
    def should_stop(self) -> bool:
        return 0 < self._stop_after <= len(self.steps)

    @property
    def swarm_tokens(self) -> int:
        return 100 * len(self.steps)

    def step(self, tokens: int, loss: float | Tensor) -> None:
        assert not self.ends
        self.steps.append((tokens, float(loss)))
        self.rates.append(self.optimizers[0].param_groups[0]["lr"])

    def shard(self, dataset: Sized) -> list[int]:
        """Backwards: an order that nothing else would draw."""
        return list(reversed(range(len(dataset))))

    def lr_scale(self, schedule: Schedule) -> float:
        return schedule(self.swarm_tokens)

    def metrics(self) -> dict[str, Any]:
        return {"round": len(self.steps), "swarm_tokens": self.swarm_tokens}

    def finish(self) -> bool:
        """Set the parameters to the swarm's own model, which is all ones."""
        self.ends.append("finish")
        self.left_with = [parameter.detach().clone() for parameter in self.model.parameters()]
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(1.0)
        return True

    @contextmanager
    def average(self) -> Iterator[None]:
        """Set the parameters to the averaged model, which is all zeros and not here the first time."""
        self.averages += 1
        if self.averages == 1:
            raise StorageError("still fetching")
        with torch.no_grad():
            live = [parameter.clone() for parameter in self.model.parameters()]
            for parameter in self.model.parameters():
                parameter.zero_()
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, values in zip(self.model.parameters(), live, strict=True):
                    parameter.copy_(values)

    def leave(self) -> None:
        self.ends.append("leave")

    def abandon(self) -> None:
        if not self.ends:
            self.ends.append("abandon")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.ends.append(kind.__name__ if kind else "exit")


class Fakes:
    """Stands in for `Peer.attach`: each call gives a new fake."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[FakePeer] = []
        self.stop_after = 0
        self.folder: Path | None = None
        monkeypatch.setattr(Peer, "attach", self._attach)

    def _attach(self, model: nn.Module, optimizers: Any, *, name: str = "") -> FakePeer:
        peer = FakePeer(model, optimizers, folder=self.folder, stop_after=self.stop_after)
        self.made.append(peer)
        return peer

    @property
    def peer(self) -> FakePeer:
        """The fake of the only call."""
        (peer,) = self.made
        return peer
