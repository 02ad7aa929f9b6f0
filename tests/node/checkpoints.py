"""A small model that has trained, and its checkpoint."""

import torch
from torch import nn

from gossamer.models.task import named_tensors
from gossamer.node.trainer.checkpoint import CheckpointWriter, Progress
from gossamer.node.trainer.outer import OuterLoop
from tests.protocol import builders


def outer_of(model):
    tensors = tuple((name, tuple(p.shape), "mean") for name, p in named_tensors(model))
    return OuterLoop(dict(named_tensors(model)), builders.manifest(tensors=tensors))


def make(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3))
    return model, outer_of(model), torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model, outer, optimizer, steps):
    for step in range(steps):
        loss = model(torch.full((2, 6), 0.1 * step)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        outer.step(tokens=2, loss=loss.detach())


def trained():
    model, outer, optimizer = make()
    out = memoryview(bytearray(10_000))
    train(model, outer, optimizer, 5)
    outer.publish(1, 1, out)
    train(model, outer, optimizer, 3)
    outer.publish(0, 2, out)
    return model, outer, optimizer


def saved_in(folder):
    """The checkpoint of a model that has trained, and what is in it."""
    _, outer, optimizer = trained()
    path = folder / "trainer.checkpoint"
    CheckpointWriter(path).save(outer, [optimizer], Progress(8, 16))
    return path, outer, optimizer
