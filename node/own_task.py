"""Which task a node runs: one that comes with Gossamer, or one in a file that its owner has named, once.

A manifest says what is trained by name only, and that name is never looked up on this machine: code of
somebody's own runs here because the person at it gave its file to `gossamer node --task`, which the folder
remembers.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gossamer.models.errors import TaskError
from gossamer.models.registry import TaskKind, find_kind, task_names
from gossamer.models.task_file import TaskFile, flag_for, is_own_name, load, parse_task_file
from gossamer.node.home import Home
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.manifest import Manifest

if TYPE_CHECKING:
    from gossamer.models.task import Task

log = logging.getLogger("gossamer.node")


def remember_task(home: Home, text: str) -> None:
    """Keep which file holds the swarm's task, as the command line names it.

    A file that is not the one that the manifest was written with is used all the same, and the log says so.
    Raises ConfigError if the swarm trains something else, or StorageError.
    """
    manifest = home.manifest()
    if manifest is None:
        raise ConfigError(f"{home.root} is not the folder of a node; give one with --dir")
    swarm, name = manifest.swarm.name, manifest.task.name
    if name in task_names():
        raise ConfigError(f"swarm {swarm!r} trains {name!r}, which comes with Gossamer: leave --task out")
    try:
        file = parse_task_file(text)
    except TaskError as error:
        raise ConfigError(f"--task: {error}") from None
    if file.name != name:
        raise ConfigError(
            f"swarm {swarm!r} trains {name!r}, and {text} is {file.name!r}: give the file of that"
        )
    home.keep_task(str(file))


def check_trainable(home: Home) -> None:
    """Raise ConfigError if the swarm's task is not one of ours, and no file of it is known here."""
    manifest = home.manifest()
    assert manifest is not None
    if manifest.task.name in task_names():
        return
    file = _remembered(home, manifest)
    source = _source(file)
    if manifest.task.source and source != manifest.task.source:
        log.warning(
            "%s is not the file that the manifest was written with (%s, not %s): if that was not intended,"
            " take the other",
            file.path,
            source[:12],
            manifest.task.source[:12],
        )


def build(home: Home, manifest: Manifest, data: Sequence[Path] = ()) -> "Task":
    """The swarm's task, with this node's data. Raises ConfigError, or TaskError for a mistake in it."""
    return _kind(home, manifest).task(manifest.task.options, data)


def _kind(home: Home, manifest: Manifest) -> TaskKind:
    name = manifest.task.name
    return find_kind(name) if name in task_names() else load(_remembered(home, manifest))


def _remembered(home: Home, manifest: Manifest) -> TaskFile:
    text = home.task()
    if text is None:
        raise ConfigError(_what_to_type(manifest))
    try:
        return parse_task_file(text)
    except TaskError as error:
        raise ConfigError(f"the task that {home.root} remembers: {error}, and give --task again") from None


def _source(file: TaskFile) -> str:
    try:
        return file.source()
    except TaskError as error:
        raise ConfigError(str(error)) from None


def _what_to_type(manifest: Manifest) -> str:
    swarm, name = manifest.swarm.name, manifest.task.name
    if not is_own_name(name):
        return (
            f"swarm {swarm!r} trains {name!r}, which is a script of its own: join with Peer.attach in that"
            " script (docs/your-model.md), or hold a replica with --observe"
        )
    return (
        f"swarm {swarm!r} trains {name!r}, a task of its owner's own: get its file from them, read it, and"
        f" say where it is with {flag_for(name)}; or hold a replica with --observe"
    )
