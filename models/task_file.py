"""A custom task in a file, ``my_task.py:MyTask`` on the command line.

A person who types that runs their own code, as with ``python my_task.py``. The path never comes from the
network: a manifest holds only the name ``my_task:MyTask`` and a digest of the file, and each node's owner
says which file that is.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from gossamer.models import TaskError, in_one_line
from gossamer.models.registry import OptionValue, TaskKind, choices, find_kind

if TYPE_CHECKING:
    from gossamer.models.task import DataStream, Task

_NAME = re.compile(r"[\w-]+:\w+", re.ASCII)
_INTERFACE = "gossamer.models.task.Task"


@dataclass(frozen=True, slots=True)
class TaskFile:
    """A class in a file. `str()` of it is what `parse_task_file` reads."""

    path: Path
    """Absolute path."""
    class_name: str

    def __str__(self) -> str:
        return f"{self.path}:{self.class_name}"

    @property
    def name(self) -> str:
        """The task's name in a manifest; it does not say where the file lies."""
        return f"{self.path.stem}:{self.class_name}"

    def source(self) -> str:
        """SHA-256 of the file in hex, with CRLF taken as LF. Raises TaskError."""
        try:
            return sha256(self.path.read_bytes().replace(b"\r\n", b"\n")).hexdigest()
        except OSError as error:
            raise TaskError(f"cannot read the task's file {self.path}: {error.strerror}") from None


def is_own_name(name: str) -> bool:
    """Whether a manifest's task is a custom one in a file, by its name."""
    return _NAME.fullmatch(name) is not None


def flag_for(name: str) -> str:
    """What to type for a manifest's task that is in a file, if the file lies in the current folder."""
    stem, class_name = name.split(":")
    return f"--task {stem}.py:{class_name}"


def parse_task_file(text: str) -> TaskFile:
    """Read ``FILE.py:CLASS``. Raises TaskError, also if there is no such file."""
    name, _, class_name = text.rpartition(":") if ":" in text else (text, "", "")
    # Not Path.expanduser, which raises if the home folder is not known.
    path = Path(os.path.expanduser(name)).absolute()
    if path.suffix != ".py":
        raise TaskError(f"name your own task as FILE.py:CLASS, for example my_task.py:MyTask, not {text!r}")
    if not path.is_file():
        raise TaskError(f"there is no file {name}: check its spelling")
    if not class_name:
        raise TaskError(f"{name} may hold several tasks: name the class, {name}:CLASS")
    file = TaskFile(path, class_name)
    if not is_own_name(file.name):
        raise TaskError(
            f"{file.name!r} cannot be a task's name: use letters, digits, _ and - in the file name"
        )
    return file


def kind_of(text: str) -> TaskKind:
    """The task that a command line names: one that comes with Gossamer, or one in a file, which is run.

    Raises:
        TaskError: there is no such task, or the file cannot be used; the message says why.
    """
    return load(parse_task_file(text)) if ":" in text or text.endswith(".py") else find_kind(text)


def load(file: TaskFile) -> TaskKind:
    """Run the file and take the task from it.

    Raises:
        TaskError: the file does not run, or its class is not a complete task.
    """
    source = file.source()
    with task_errors(file.path.name):
        module = _import(file.path)
    cls = _task_class(file, module)
    adapted = _adapted(cls)

    def build(options: Any, data: Sequence[Path]) -> Task:
        with task_errors(f"{file.class_name}(options, data)"):
            return adapted(options, data)

    return TaskKind(file.name, _options_class(file, cls), build, source)


def _adapted(cls: type[Task]) -> type[Task]:
    """The class, with what is easily forgotten done for it: torch's generator is seeded for the model and put
    back, the model is in train mode, an evaluation is in eval mode without gradient, and when `batches` ends,
    another pass begins with a seed of its own."""
    import torch

    from gossamer.models.task import evaluating

    class Adapted(cls):  # type: ignore[misc, valid-type]
        def build_model(self, seed: int) -> torch.nn.Module:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model: torch.nn.Module = super().build_model(seed)
            return model.train()

        def evaluate(self, model: torch.nn.Module) -> float:
            with evaluating(model):
                return float(super().evaluate(model))

        def batches(self, stream: DataStream) -> Iterator[Any]:
            begun, number = stream.skip_batches, 0
            while True:
                empty = True
                for batch in super().batches(stream):
                    empty = False
                    yield batch
                if empty and not stream.skip_batches:
                    raise TaskError(f"{cls.__name__}.batches yielded nothing: is there data (--data)?")
                number += 1
                seed = stream.derived_seed(f"pass {number} from batch {begun}")
                stream = dataclasses.replace(stream, seed=seed, skip_batches=0)

    Adapted.__name__ = cls.__name__
    return Adapted


_folders: set[Path] = set()
"""Where the files lie that `load` has run."""


@contextmanager
def task_errors(doing: str = "") -> Iterator[None]:
    """Inside, an exception in a loaded file, or in one beside it, becomes a TaskError: one line that says
    where.

    `--debug` shows the traceback. Other exceptions pass, unless `doing` says what they would be the task's
    fault in.
    """
    try:
        yield
    except TaskError:
        raise
    except (Exception, SystemExit) as error:
        if where := _where(error) or doing:
            text = f": {in_one_line(error)}" if str(error) else ""
            raise TaskError(f"{where}: {type(error).__name__}{text}") from error
        raise


def _where(error: BaseException) -> str:
    """``file.py:31`` for the innermost line in the folder of a loaded file; empty if there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.parent in _folders:
            return f"{path.name}:{frame.lineno}"
    return ""


def _import(path: Path) -> ModuleType:
    """Import a file as ``python FILE`` would: it can import files beside it. Its module has the file's
    name."""
    name, folder = path.stem, str(path.parent)
    _folders.add(path.parent)
    known = sys.modules.get(name)
    if name in sys.stdlib_module_names or (known and getattr(known, "__file__", None) != str(path)):
        raise TaskError(f"{path.name} has the name of another Python module, {name!r}: rename the file")
    if sys.path[0] != folder:
        sys.path.insert(0, folder)
    sys.modules.pop(name, None)  # the file may have changed
    importlib.invalidate_caches()
    return importlib.import_module(name)


def _task_class(file: TaskFile, module: ModuleType) -> type[Task]:
    from gossamer.models.task import Task

    where = file.path.name
    cls = getattr(module, file.class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, Task)):
        found = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Task) and value is not Task
        ]
        there = choices(file.class_name, found) if found else "derive it from that"
        raise TaskError(f"{where} has no class {file.class_name!r} that is a {_INTERFACE}; {there}")
    if missing := ", ".join(sorted(cls.__abstractmethods__)):
        raise TaskError(f"{file.class_name} in {where} lacks {missing}: see {_INTERFACE} for what they do")
    return cls


def _options_class(file: TaskFile, cls: type[Task]) -> Any:
    """The class's options, checked: a manifest must be able to hold their values."""
    options, where = cls.Options, f"{file.path.name}: {file.class_name}.Options"
    if not (isinstance(options, type) and dataclasses.is_dataclass(options)):
        raise TaskError(f"{where} is not a dataclass: decorate it with @dataclass(frozen=True)")
    with task_errors(where):
        hints = get_type_hints(options)
    for field in dataclasses.fields(options):
        if hints[field.name] not in get_args(OptionValue) or field.default is dataclasses.MISSING:
            raise TaskError(f"{where}.{field.name} must be a str, int, float or bool, and have a default")
    return options
