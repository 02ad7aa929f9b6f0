"""Tasks by name, for manifests and the command line, which can only hold names and plain values.

Every option is checked here by name and type and by the task's own options class for its range, so that
a typing error in a manifest is one clear line before anything is built. Importing this file is cheap;
torch is first imported when a task is asked for.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar, get_type_hints

from gossamer.models.errors import TaskError

if TYPE_CHECKING:
    from gossamer.models.task import Task

OptionValue = str | int | float | bool
"""What TOML, msgpack and a command line can all hold."""

_Options = TypeVar("_Options", bound="TaskOptions")
_WORDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


class TaskOptions(Protocol):
    """A frozen dataclass of `OptionValue` fields, all with defaults, that refuses impossible values."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def resolved(self) -> Self:
        """The same with every value written out that only stands for a default."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class TaskKind:
    """A kind of task: its options and its constructor."""

    options: type[TaskOptions]
    build: Callable[[Any, Sequence[Path]], Task]


def _text() -> TaskKind:
    from gossamer.models.text import ByteTextTask, TextOptions

    return TaskKind(TextOptions, ByteTextTask)


_KINDS: dict[str, Callable[[], TaskKind]] = {"text": _text}


def task_names() -> tuple[str, ...]:
    """The tasks that come with Gossamer, sorted."""
    return tuple(sorted(_KINDS))


def build_task(name: str, options: Mapping[str, OptionValue], data: Sequence[Path] = ()) -> Task:
    """The task of that name. `data` are this node's own files and folders; empty means the task's default.

    Raises:
        TaskError: unknown name or option, a value of the wrong type or out of range. The data is looked
            at only when it is first needed, so mistakes in it are raised there.
    """
    kind = _kind(name)
    return kind.build(parse_options(kind.options, name, options), data)


def resolve_options(name: str, options: Mapping[str, OptionValue]) -> dict[str, OptionValue]:
    """All options of a task, checked, with defaults filled in.

    This is what a manifest should record: a swarm outlives the defaults of the version it began with.

    Raises:
        TaskError: as `build_task`.
    """
    return dataclasses.asdict(parse_options(_kind(name).options, name, options).resolved())


def parse_options(cls: type[_Options], task: str, options: Mapping[str, OptionValue]) -> _Options:
    """`options` as an instance of the options class `cls`; `task` is only for the messages.

    Raises:
        TaskError: unknown option, wrong type, NaN or infinity, or refused by `cls` itself.
    """
    types = get_type_hints(cls)
    values: dict[str, OptionValue] = {}
    for key, value in options.items():
        if key not in types:
            raise TaskError(f"task {task!r} has no option {key!r}; {_choices(key, types)}")
        values[key] = _convert(task, key, value, types[key])
    return cls(**values)


def _convert(task: str, key: str, value: OptionValue, wanted: type) -> OptionValue:
    # bool is an int to Python, but `batch_size = true` is a mistake.
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise TaskError(f"option {key!r} of task {task!r} must be {_WORDS[wanted]}, not {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise TaskError(f"option {key!r} of task {task!r} must be finite, not {value!r}")
    return value


def _kind(name: str) -> TaskKind:
    if name not in _KINDS:
        raise TaskError(f"there is no task {name!r}; {_choices(name, _KINDS)}")
    return _KINDS[name]()


def _choices(wrong: str, valid: Iterable[str]) -> str:
    names = sorted(valid)
    near = difflib.get_close_matches(wrong, names, n=1)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return f"{guess}choose from {', '.join(names)}"
