"""Use the trained model: load it into a model, and generate text with it."""

from collections.abc import Iterator

import torch
from torch import nn

from gossamer.models import TaskError
from gossamer.models.registry import task_names
from gossamer.models.task import named_tensors
from gossamer.models.task_file import is_own_name, task_errors
from gossamer.node.exports.export import model_in
from gossamer.node.home import Home, manifest_of
from gossamer.node.trainer.data import build_task
from gossamer.node.trainer.parameters import check_fits
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.fixedpoint import Ints, to_float
from gossamer.protocol.manifest import Manifest


def load_into(model: nn.Module, manifest: Manifest, phi: Ints) -> None:
    """Set a model's parameters to Phi, int32[numel] in snapshot order."""
    by_name = dict(named_tensors(model))
    with torch.no_grad():
        for spec, values in manifest.plan().tensors(phi):
            by_name[spec.name].copy_(torch.from_numpy(to_float(values).reshape(spec.shape)))


def generate(
    home: Home, prompt: str, length: int, *, temperature: float, seed: int, live: bool = False
) -> Iterator[str]:
    """Continue a prompt with the averaged model in a node's folder, or the live one, piece by piece.

    Raises ConfigError or StorageError, as the first piece is taken or later.
    """
    manifest = manifest_of(home)
    name = manifest.task.name
    if name not in task_names() and not is_own_name(name):
        raise ConfigError(
            f"swarm {manifest.swarm.name!r} trains {name!r}, a script of its own, and only that"
            " can run the model; gossamer export writes the model for other programs"
        )
    _, _, phi = model_in(home, live=live)
    try:
        with task_errors():
            task = build_task(home, manifest)
            model = task.build_model(manifest.task.seed)
            check_fits(dict(named_tensors(model)), manifest)
            load_into(model, manifest, phi)
            yield from task.sample(model, prompt, length, temperature=temperature, seed=seed)
    except TaskError as error:
        raise ConfigError(str(error)) from error
