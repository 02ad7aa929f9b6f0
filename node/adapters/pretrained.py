"""What a Hugging Face model needs besides its weights, kept in the node's folder for `gossamer export`.

``pretrained/`` holds config.json, generation_config.json and the tokenizer's or processor's files, as
`from_pretrained` wants them beside the weights; frozen.json names what the model has besides the swarm's.
"""

import copy
import json
import logging
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from gossamer.models.errors import in_one_line
from gossamer.models.task import local_names
from gossamer.node.exports.pretrained import FROZEN
from gossamer.node.storage.home import Home
from gossamer.node.storage.wholefile import write_atomically

log = logging.getLogger("gossamer.peer")


def keep_pretrained(home: Home, model: nn.Module, processor: Any = None) -> None:
    """Write a model's configuration, and its tokenizer or processor if there is one. Each file appears whole.

    Does nothing for a model that has no `config` with a `save_pretrained`. A failure is only logged, since
    training does not need these files.
    """
    configuration: Any = getattr(model, "config", None)
    if not hasattr(configuration, "save_pretrained"):
        return
    try:
        _keep(home, model, copy.deepcopy(configuration), processor)
    except Exception as error:  # custom configurations and tokenizers may raise anything
        log.warning(
            "cannot keep the model's configuration in %s: %s", home.pretrained_path, in_one_line(error)
        )


def _keep(home: Home, model: nn.Module, configuration: Any, processor: Any) -> None:
    # As the model's own `save_pretrained` would write it. torch.compile wraps the model, FSDP2 renames its
    # class.
    architecture = type(getattr(model, "_orig_mod", model)).__name__
    configuration.architectures = [architecture.removeprefix("FSDP")]
    manifest = home.manifest()
    shared = {spec.name for spec in manifest.layout.tensors} if manifest else set()
    parts = [configuration, getattr(model, "generation_config", None), processor]
    with TemporaryDirectory(dir=home.root, prefix=".pretrained-") as aside:
        for part in parts:
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(aside)
        Path(aside, FROZEN).write_text(json.dumps(local_names(model, shared)))
        for file in sorted(path for path in Path(aside).rglob("*") if path.is_file()):
            target = home.pretrained_path / file.relative_to(aside)
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(target, file.read_bytes())
