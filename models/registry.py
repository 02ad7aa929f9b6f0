"""Tasks by name, for manifests and the command line, which can only hold names and plain values.

Every option's name and type are checked here, and its range by the task's own options class, so that a typing
error in a manifest gives one clear line before anything is built. Importing this file is cheap; torch is only
imported when a task is asked for.

Only tasks that come with Gossamer have a name here, so that a manifest from the network can never choose the
code that a node runs. The file of a custom task is named by the node's owner, see `task_file`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from gossamer.models import TaskError, in_one_line

if TYPE_CHECKING:
    from gossamer.models.task import Task

OptionValue = str | int | float | bool
"""What TOML, msgpack and a command line can all hold."""

_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


@dataclasses.dataclass(frozen=True, slots=True)
class TaskKind:
    """A kind of task: its name in manifests, its options and its constructor."""

    name: str
    options: type[Any]
    """A frozen dataclass of `OptionValue` fields, all with defaults, that refuses impossible values. A method
    `resolved`, if it has one, puts defaults in place of values that only stand for them."""
    build: Callable[[Any, Sequence[Path]], Task]
    source: str = ""
    """For a custom task: SHA-256 of its file, in hex."""

    def task(self, options: Mapping[str, OptionValue], data: Sequence[Path] = ()) -> Task:
        """A task of this kind. `data` are this node's own files and folders; empty means its default.

        Raises:
            TaskError: an unknown option, a value of the wrong type or out of range. The data is looked
                at only when it is first needed, so mistakes in it are raised there.
        """
        return self.build(self._parse(options), data)

    def resolve(self, options: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
        """All options, checked, with defaults filled in.

        This is what a manifest should record: a swarm outlives the defaults of the version it began with.

        Raises:
            TaskError: as `task`.
        """
        parsed = self._parse(options)
        values = dataclasses.asdict(parsed.resolved() if hasattr(parsed, "resolved") else parsed)
        return dataclasses.asdict(self._parse(values))  # custom defaults may be of other types

    def read(self, settings: Iterable[str]) -> dict[str, OptionValue]:
        """Read options as given on a command line, each ``key=value``, for `task` and `resolve` to check.

        Raises:
            TaskError: no ``=``, or a repeated key.
        """
        types = get_type_hints(self.options)
        values: dict[str, OptionValue] = {}
        for setting in settings:
            key, equals, text = setting.partition("=")
            if not equals:
                raise TaskError(f"option {setting!r} has no value: write it as {setting}=VALUE")
            if key in values:
                raise TaskError(f"option {key!r} is given twice: give it once")
            values[key] = text
            with suppress(ValueError, KeyError):  # a text that is none of its type stays a text
                wanted = types[key]
                values[key] = {"true": True, "false": False}[text.lower()] if wanted is bool else wanted(text)
        return values

    def _parse(self, options: Mapping[str, OptionValue]) -> Any:
        """An instance of the options class. Raises TaskError, also for NaN and infinity."""
        hints = get_type_hints(self.options)
        types = {field.name: hints[field.name] for field in dataclasses.fields(self.options)}
        values: dict[str, OptionValue] = {}
        for key, value in options.items():
            if key not in types:
                valid = choices(key, types) if types else "it has no options"
                raise TaskError(f"task {self.name!r} has no option {key!r}; {valid}")
            # bool is an int to Python, but `batch_size = true` is a mistake.
            values[key] = value = float(value) if types[key] is float and type(value) is int else value
            if type(value) is not types[key]:
                wanted = _WORDS[types[key]]
                raise TaskError(f"option {key!r} of task {self.name!r} must be {wanted}, not {value!r}")
            if isinstance(value, float) and not math.isfinite(value):
                raise TaskError(f"option {key!r} of task {self.name!r} must be finite, not {value!r}")
        try:
            return self.options(**values)
        except TaskError:
            raise
        except Exception as error:
            raise TaskError(f"task {self.name!r} refuses its options: {in_one_line(error)}") from error


_TASKS = {"text": "gossamer.models.text:ByteTextTask"}


def task_names() -> tuple[str, ...]:
    """The tasks that come with Gossamer, sorted."""
    return tuple(sorted(_TASKS))


def find_kind(name: str) -> TaskKind:
    """The kind of task of that name. Raises TaskError for an unknown one."""
    if name not in _TASKS:
        raise TaskError(f"there is no task {name!r}; {choices(name, _TASKS)}")
    task = pkgutil.resolve_name(_TASKS[name])
    return TaskKind(name, task.Options, task)


def build_task(name: str, options: Mapping[str, OptionValue], data: Sequence[Path] = ()) -> Task:
    """The task of that name, see `TaskKind.task`. Raises TaskError, also for an unknown name."""
    return find_kind(name).task(options, data)


def choices(wrong: str, valid: Iterable[str]) -> str:
    """What to choose from, with a guess first: the end of an error message."""
    names = sorted(valid)
    near = difflib.get_close_matches(wrong, names, n=1)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return f"{guess}choose from {', '.join(names)}"
