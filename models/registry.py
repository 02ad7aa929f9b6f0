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
        return self.build(parse_options(self.options, self.name, options), data)

    def resolve(self, options: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
        """All options, checked, with defaults filled in.

        This is what a manifest should record: a swarm outlives the defaults of the version it began with.

        Raises:
            TaskError: as `task`.
        """
        parsed = parse_options(self.options, self.name, options)
        values = dataclasses.asdict(parsed.resolved() if hasattr(parsed, "resolved") else parsed)
        parsed = parse_options(self.options, self.name, values)  # custom defaults may be of other types
        return dataclasses.asdict(parsed)

    def read(self, settings: Iterable[str]) -> dict[str, OptionValue]:
        """Read options as given on a command line, each ``key=value``.

        Raises:
            TaskError: no ``=``, an unknown or repeated key, or a value that is not of its type.
        """
        types = _types(self.options)
        values: dict[str, OptionValue] = {}
        for setting in settings:
            key, equals, text = setting.partition("=")
            if not equals:
                raise TaskError(f"option {setting!r} has no value: write it as {setting}=VALUE")
            _check_key(self.name, key, types)
            if key in values:
                raise TaskError(f"option {key!r} is given twice: give it once")
            value: OptionValue = text
            with suppress(ValueError, KeyError):  # `_convert` says what it must be
                wanted = types[key]
                value = {"true": True, "false": False}[text.lower()] if wanted is bool else wanted(text)
            values[key] = _convert(self.name, key, value, types[key])
        return values


def _text() -> TaskKind:
    from gossamer.models.text import ByteTextTask, TextOptions

    return TaskKind("text", TextOptions, ByteTextTask)


_KINDS: dict[str, Callable[[], TaskKind]] = {"text": _text}


def task_names() -> tuple[str, ...]:
    """The tasks that come with Gossamer, sorted."""
    return tuple(sorted(_KINDS))


def find_kind(name: str) -> TaskKind:
    """The kind of task of that name. Raises TaskError for an unknown one."""
    if name not in _KINDS:
        raise TaskError(f"there is no task {name!r}; {choices(name, _KINDS)}")
    return _KINDS[name]()


def build_task(name: str, options: Mapping[str, OptionValue], data: Sequence[Path] = ()) -> Task:
    """The task of that name, see `TaskKind.task`. Raises TaskError, also for an unknown name."""
    return find_kind(name).task(options, data)


def resolve_options(name: str, options: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """All options of the task of that name, see `TaskKind.resolve`. Raises TaskError."""
    return find_kind(name).resolve(options)


def parse_options(cls: type[Any], task: str, options: Mapping[str, OptionValue]) -> Any:
    """`options` as an instance of the options class `cls`; `task` is only for the messages.

    Raises:
        TaskError: an unknown option, a wrong type, NaN or infinity, or a refusal by `cls` itself.
    """
    types = _types(cls)
    values: dict[str, OptionValue] = {}
    for key, value in options.items():
        _check_key(task, key, types)
        values[key] = _convert(task, key, value, types[key])
    try:
        return cls(**values)
    except TaskError:
        raise
    except Exception as error:
        raise TaskError(f"task {task!r} refuses its options: {in_one_line(error)}") from error


def choices(wrong: str, valid: Iterable[str]) -> str:
    """What to choose from, with a guess first: the end of an error message."""
    names = sorted(valid)
    near = difflib.get_close_matches(wrong, names, n=1)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return f"{guess}choose from {', '.join(names)}"


def _types(cls: type[Any]) -> dict[str, type]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _check_key(task: str, key: str, types: Mapping[str, type]) -> None:
    if not types:
        raise TaskError(f"task {task!r} has no option {key!r}: it has no options")
    if key not in types:
        raise TaskError(f"task {task!r} has no option {key!r}; {choices(key, types)}")


def _convert(task: str, key: str, value: OptionValue, wanted: type) -> OptionValue:
    # bool is an int to Python, but `batch_size = true` is a mistake.
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise TaskError(f"option {key!r} of task {task!r} must be {_WORDS[wanted]}, not {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise TaskError(f"option {key!r} of task {task!r} must be finite, not {value!r}")
    return value
