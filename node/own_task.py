"""Which task a node runs: one that comes with Gossamer, or one in a file that its owner has named once.

A manifest only names what is trained, and that name is never looked up on this machine. Custom code runs here
only because the person at this machine gave its file to `gossamer node --task`, which the folder remembers.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.models.errors import TaskError
from gossamer.models.registry import find_kind, task_names
from gossamer.models.task_file import TaskFile, flag_for, is_own_name, load, parse_task_file
from gossamer.node.storage.home import Home, manifest_of
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.manifest import Manifest

if TYPE_CHECKING:
    from gossamer.models.task import Task

log = logging.getLogger("gossamer.node")


def remember_task(home: Home, text: str) -> None:
    """Store which file holds the swarm's task, as the command line names it.

    Raises ConfigError if the swarm trains something else, or StorageError.
    """
    home.keep_task(str(task_file(manifest_of(home), text)))


def check_trainable(home: Home) -> None:
    """Raise ConfigError if the swarm's task does not come with Gossamer and no file of it is known here.

    A file that differs from the one that the manifest was written with will do, and the log says so.
    """
    manifest = manifest_of(home)
    if manifest.task.name not in task_names():
        text = home.task()
        if text is None:
            raise ConfigError(f"{_what_to_type(manifest)}; or hold a replica with --observe")
        difference = difference_of(manifest, task_file(manifest, text))
        if difference:
            log.warning("%s", difference)


def build(home: Home, manifest: Manifest, data: Sequence[Path] = ()) -> "Task":
    """The swarm's task, with this node's data. Raises ConfigError, or TaskError for a mistake in it."""
    name = manifest.task.name
    kind = find_kind(name) if name in task_names() else load(task_file(manifest, home.task()))
    return kind.task(manifest.task.options, data)


def task_file(manifest: Manifest, text: str | None) -> TaskFile:
    """The file of the swarm's task. `text` names it as a person at this machine has; None if nobody has.

    Raises ConfigError if nobody has named it, if it holds another task, or if it is not there.
    """
    swarm, name = manifest.swarm.name, manifest.task.name
    if name in task_names():
        raise ConfigError(f"swarm {swarm!r} trains {name!r}, which comes with Gossamer: leave --task out")
    if text is None:
        raise ConfigError(_what_to_type(manifest))
    try:
        file = parse_task_file(text)
    except TaskError as error:
        raise ConfigError(f"the swarm's task: {error}; --task says where it is") from None
    if file.name != name:
        raise ConfigError(
            f"swarm {swarm!r} trains {name!r}, but {text} is {file.name!r}: give the file of the swarm's task"
        )
    return file


def difference_of(manifest: Manifest, file: TaskFile) -> str:
    """A warning if the file is not the one that the manifest was written with, else "". Raises
    ConfigError."""
    try:
        source = file.source()
    except TaskError as error:
        raise ConfigError(str(error)) from None
    if manifest.task.source in ("", source):
        return ""
    return (
        f"{file.path} is not the file that the manifest was written with ({source[:12]}, not"
        f" {manifest.task.source[:12]}): if that was not intended, use the other"
    )


def _what_to_type(manifest: Manifest) -> str:
    swarm, name = manifest.swarm.name, manifest.task.name
    if not is_own_name(name):
        return (
            f"swarm {swarm!r} trains {name!r}, which is a script of its own: join with Peer.attach in that"
            " script (docs/your-model.md)"
        )
    return (
        f"swarm {swarm!r} trains {name!r}, a custom task of its owner: get its file from them, read it, and"
        f" give it with {flag_for(name)}"
    )
