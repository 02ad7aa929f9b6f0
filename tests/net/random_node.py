"""One node of a random swarm: a model with unusual parts, any inner optimizer, an ordinary training loop.

`run` is the script, run as a process; `test_random_swarms.py` draws its options. Files in a folder that all
nodes share control it: ``stop`` ends training, ``again`` makes all nodes rest once more, when all hold the
same, and ``leave`` ends the process. It reports what happens in lines of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.models.task import named_tensors
from gossamer.node import Peer
from gossamer.node.trainer.data import cosine
from gossamer.protocol.errors import DivergedError, LocalError

FEATURES = 6
WORDS = 40
CLIP_NORM = 1.0

PARTS = (
    "scalar", "single", "norm", "words", "rare", "tied", "frozen", "unused", "huge", "tiny", "weightnorm",
)  # fmt: skip
"""Parts that a model may have beside its two layers."""

OPTIMIZERS = ("sgd", "idle", "momentum", "adam", "adamw", "rmsprop", "lbfgs")


class Zoo(nn.Module):
    """A small regression with parameters of all kinds that users have."""

    def __init__(self, parts: list[str], dtype: str, width: int, model_seed: int) -> None:
        super().__init__()
        torch.manual_seed(model_seed)
        self.body = nn.Linear(FEATURES, width).to(getattr(torch, dtype))
        self.head = nn.Linear(width, 1)
        makers: dict[str, Callable[[], nn.Module | nn.Parameter]] = {
            "scalar": lambda: nn.Parameter(torch.tensor(1.0)),
            "single": lambda: nn.Parameter(torch.zeros(1)),
            "norm": lambda: nn.BatchNorm1d(width),
            "words": lambda: nn.Embedding(WORDS, width),
            "rare": lambda: nn.Embedding(WORDS, width, sparse=True),
            "tied": lambda: nn.Linear(width, FEATURES, bias=False),
            "frozen": lambda: nn.Linear(FEATURES, width).requires_grad_(False),
            "unused": lambda: nn.Parameter(torch.randn(3, 1, 2)),
            "huge": lambda: nn.Parameter(torch.full((7,), 60.0)),
            "tiny": lambda: nn.Parameter(torch.full((5,), 1e-8)),
            "weightnorm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(width, 3)),
        }
        self.parts = set(parts)
        for part in parts:
            setattr(self, part, makers[part]())
        if "tied" in parts:
            self.untied = nn.Linear(width, FEATURES, bias=False)
            self.untied.weight = self.tied.weight

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.body(inputs.to(self.body.weight.dtype)).float()
        words = (inputs[:, 0].abs() * 7).long() % WORDS
        for name in self.parts & {"words", "rare"}:
            hidden = hidden + 0.1 * getattr(self, name)(words)
        if "frozen" in self.parts:
            hidden = hidden + 0.1 * self.frozen(inputs)
        if "norm" in self.parts:
            hidden = self.norm(hidden)
        hidden = hidden.tanh()
        if "tied" in self.parts:
            hidden = hidden + 0.1 * nn.functional.linear(self.tied(hidden), self.untied.weight.T)
        return self._scaled(self.head(hidden), hidden)

    def _scaled(self, out: Tensor, hidden: Tensor) -> Tensor:
        if "weightnorm" in self.parts:
            out = out + 0.1 * self.weightnorm(hidden).sum(1, keepdim=True)
        if "huge" in self.parts:
            out = out + 0.01 * (self.huge - 60).mean()
        if "tiny" in self.parts:
            out = out + self.tiny.sum()
        if "scalar" in self.parts:
            out = out * self.scalar
        return out + self.single if "single" in self.parts else out


def digest(model: nn.Module) -> str:
    """The digest of all parameters that the swarm shares."""
    hashed = sha256()
    for _, parameter in named_tensors(model):
        hashed.update(parameter.detach().float().numpy().tobytes())
    return hashed.hexdigest()


def _optimizers(model: Zoo, kind: str) -> list[torch.optim.Optimizer]:
    """Inner optimizers for a model; parameters with sparse gradients have a separate one."""
    dense = [p for n, p in model.named_parameters() if p.requires_grad and not n.startswith("rare")]
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(dense, lr=0.02),
        "idle": lambda: torch.optim.SGD(dense, lr=0.0),
        "momentum": lambda: torch.optim.SGD(dense, lr=0.01, momentum=0.9),
        "adam": lambda: torch.optim.Adam(dense, lr=2e-3, eps=1e-4),
        "adamw": lambda: torch.optim.AdamW(dense, lr=2e-3, eps=1e-4),
        "rmsprop": lambda: torch.optim.RMSprop(dense, lr=1e-3, eps=1e-3),
        "lbfgs": lambda: torch.optim.LBFGS(dense, lr=0.05, max_iter=2, history_size=3),
    }
    sparse = [torch.optim.SparseAdam(model.rare.parameters(), lr=2e-3)] if "rare" in model.parts else []
    return [makers[kind](), *sparse]


class Loop:
    """A user's training loop (forward, backward, step), and the faults in it."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.model = Zoo(options["parts"], options["dtype"], options["width"], options["model_seed"])
        self.optimizers = _optimizers(self.model, options["optimizer"])
        self.tokens = options["batch"] * options["accumulate"]
        self._scaler = torch.amp.GradScaler("cpu", enabled=options["scaler"])
        self._generator = torch.Generator().manual_seed(options["data_seed"])
        self._sound: dict[str, Tensor] = {}

    def _backward(self) -> Tensor:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        total = torch.zeros(())
        for _ in range(self.options["accumulate"]):
            inputs = torch.randn(self.options["batch"], FEATURES, generator=self._generator)
            target = inputs.sin().sum(1, keepdim=True)
            loss = (self.model(inputs) - target).square().mean() / self.options["accumulate"]
            self._scaler.scale(loss).backward()
            total += loss.detach()
        return total

    def _clip(self) -> None:
        """Keep the model from diverging by itself, as products of parameters do with two samples a step."""
        dense, *_ = self.optimizers
        self._scaler.unscale_(dense)
        nn.utils.clip_grad_norm_(dense.param_groups[0]["params"], CLIP_NORM)

    def train(self) -> Tensor:
        """Make one step; returns its loss."""
        if isinstance(self.optimizers[0], torch.optim.LBFGS):
            return self.optimizers[0].step(self._backward)  # type: ignore[no-any-return]
        loss = self._backward()
        self._clip()
        for optimizer in self.optimizers:
            self._scaler.step(optimizer)
        self._scaler.update()
        return loss

    def disturb(self, step: int) -> None:
        """Make the parameters explode, or move them to other memory, if it is time for that."""
        every = self.options["explodes_at"]
        if every and step % every == every - 1:
            self._sound = self._sound or {k: v.clone() for k, v in self.model.state_dict().items()}
            self.model.head.weight.data.fill_(float(self.options["explosion"]))
        if step == self.options["replaces_at"]:
            for parameter in self.model.parameters():
                parameter.data = parameter.data.clone()

    def recover(self, error: DivergedError) -> None:
        """Do as the documents say: restore sound parameters, and a sound inner state."""
        _say(diverged=str(error))
        self.model.load_state_dict(self._sound)
        self._sound = {}
        for optimizer in self.optimizers:
            optimizer.state.clear()


def _say(**what: Any) -> None:
    """Write one line at once: the daemon writes its lines into the same file."""
    os.write(1, f"{json.dumps({'at': round(time.time(), 2), **what})}\n".encode())


def _attached(options: dict[str, Any], loop: Loop) -> Peer:
    folder = Path(options["folder"])
    return Peer.attach(
        loop.model,
        loop.optimizers,
        manifest=options["manifest"],
        join=options["join"],
        invite=options["invite"],
        folder=folder,
        listen="127.0.0.1:0",
        name=folder.name,
    )


def _train(options: dict[str, Any], loop: Loop, peer: Peer, stop: Path) -> None:
    schedule = cosine(total_tokens=200_000, warm_up_tokens=100)
    scale = (lambda _: peer.lr_scale(schedule)) if options["schedule"] else (lambda _: 1.0)
    rates = [torch.optim.lr_scheduler.LambdaLR(optimizer, scale) for optimizer in loop.optimizers]
    steps = 0
    while not (stop.exists() or peer.should_stop or steps == options["steps"]):
        loss = loop.train()
        for rate in rates:
            rate.step()
        loop.disturb(steps)
        try:
            round_ = peer.step(tokens=loop.tokens, loss=loss)
            if round_ is not None:
                _say(published=round_)
        except DivergedError as error:
            loop.recover(error)
        steps += 1
        time.sleep(options["pause"])
    _say(trained=steps, told=peer.should_stop)


def _finish(loop: Loop, peer: Peer) -> bool:
    try:
        return peer.finish(timeout_s=40.0)
    except DivergedError as error:
        loop.recover(error)
        return peer.finish(timeout_s=40.0)


def _node(options: dict[str, Any]) -> None:
    """Train, rest with the swarm's own model, and rest again once all nodes hold the same."""
    folder = Path(options["folder"])
    base = folder.parent
    loop = Loop(options)
    with _attached(options, loop) as peer:
        _say(attached=peer.round)
        _train(options, loop, peer, base / "stop")
        if options["leaves"] or peer.should_stop:
            return
        _say(finished=_finish(loop, peer))
        folder.with_suffix(".finished").touch()
        while not (base / "again").exists():
            time.sleep(0.02)
            if peer.should_stop:
                return
        result = {"rests": _finish(loop, peer), "digest": digest(loop.model)}
        folder.with_suffix(".json").write_text(json.dumps(result))
        while not (base / "leave").exists():
            time.sleep(0.02)


def run(options: str, log: str) -> None:
    """Run one node's process from start to end."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    try:
        _node(json.loads(options))
    except KeyboardInterrupt:
        sys.exit(130)
    except LocalError as error:
        _say(error=f"{type(error).__name__}: {error}")
        sys.exit(3)
