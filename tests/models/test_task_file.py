"""`gossamer.models.task_file`: a task in a file of one's own, and what is said of a file that holds none."""

from __future__ import annotations

import random
import sys
from hashlib import sha256
from pathlib import Path

import pytest

from gossamer.models import TaskError
from gossamer.models.registry import TaskKind, build_task
from gossamer.models.task_file import is_own_name, kind_of, parse_task_file
from gossamer.models.text import TextOptions
from tests.models.own_tasks import GOOD, write_task


def test_a_task_is_taken_from_its_file(task_folder: Path) -> None:
    kind = kind_of(write_task(task_folder))
    assert kind.name == "own_line:Line", "nothing of where the file lies"
    assert kind.source == sha256(GOOD.encode()).hexdigest()
    assert kind.resolve({"width": 4}) == {"width": 4, "lr": 0.1, "bias": False, "note": "-"}
    model = kind.task({"width": 4}).build_model(0)
    assert [list(p.shape) for p in model.parameters()] == [[4, 8], [4], [1, 4], [1]]


def test_the_source_is_the_same_whatever_ends_its_lines(task_folder: Path) -> None:
    file = parse_task_file(write_task(task_folder))
    source = file.source()
    file.path.write_bytes(GOOD.replace("\n", "\r\n").encode())
    assert file.source() == source
    file.path.write_text(GOOD + "# more\n")
    assert file.source() != source


def test_a_home_that_nobody_knows_is_a_folder_that_is_not_there() -> None:
    with pytest.raises(TaskError, match=r"^there is no file ~nobody-at-all/x\.py: check its spelling$"):
        parse_task_file("~nobody-at-all/x.py:X")


def test_files_beside_it_can_be_imported(task_folder: Path) -> None:
    (task_folder / "own_neighbour.py").write_text("WIDTH = 3")
    kind = kind_of(
        write_task(task_folder, "width: int = 8", "width: int = __import__('own_neighbour').WIDTH")
    )
    assert kind.resolve({})["width"] == 3


def test_a_changed_file_is_read_anew(task_folder: Path) -> None:
    assert kind_of(write_task(task_folder)).resolve({})["width"] == 8
    assert kind_of(write_task(task_folder, "width: int = 8", "width: int = 9")).resolve({})["width"] == 9


def test_a_name_of_gossamers_own_is_no_file() -> None:
    assert kind_of("text").options is TextOptions


def test_a_manifest_never_names_a_file(task_folder: Path) -> None:
    """`build_task` is for names from manifests, which may have come from anywhere."""
    proof = task_folder / "proof"
    text = write_task(task_folder, "# HERE", f"open({str(proof)!r}, 'w')")
    for name in (text, "own_line:Line", str(task_folder / "own_line.py")):
        with pytest.raises(TaskError, match="there is no task"):
            build_task(name, {})
    assert not proof.exists()


@pytest.mark.parametrize("name", ["my_task:MyTask", "my-task:T", "a:B2"])
def test_what_own_tasks_are_called(name: str) -> None:
    assert is_own_name(name)


@pytest.mark.parametrize(
    "name", ["text", "custom", "a/b:C", "a b:C", "$(x):C", "a:b:C", ":C", "a:", "ä:C", "a:C\n"]
)
def test_what_no_own_task_is_called(name: str) -> None:
    assert not is_own_name(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("missing.py:Line", "there is no file missing.py: check its spelling"),
        ("own_line:Line", "name your own task as FILE.py:CLASS, for example my_task.py:MyTask"),
        ("own_line.py", "own_line.py may hold several tasks: name the class, own_line.py:CLASS"),
        ("own_line.py:", "name the class"),
        ("folder.py:Line", "there is no file folder.py"),
        ("two words.py:Line", "'two words:Line' cannot be a task's name"),
        (
            "own_line.py:line",
            "Task; did you mean 'Line'? choose from Line",
        ),
        (
            "own_line.py:dataclass",
            "has no class 'dataclass' that is a gossamer.models.task.Task",
        ),
        (
            "empty.py:Line",
            "that is a gossamer.models.task.Task; derive it from that",
        ),
        ("random.py:Line", "random.py has the name of another Python module, 'random': rename the file"),
        ("wave.py:Line", "wave.py has the name of another Python module"),  # which nothing has imported yet
    ],
)
def test_what_is_no_task(task_folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.chdir(task_folder)
    write_task(task_folder)
    for name in ("empty.py", "two words.py", "random.py", "wave.py"):
        (task_folder / name).write_text("")
    (task_folder / "folder.py").mkdir()
    with pytest.raises(TaskError) as caught:
        kind_of(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert sys.modules["random"] is random


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("# HERE", "if x = 1:", "(own_line.py, line 10)"),
        (
            "# HERE",
            "import own_nowhere",
            "own_line.py:10: ModuleNotFoundError: No module named",
        ),
        ("# HERE", "import own_broken", "own_broken.py:2: ZeroDivisionError"),
        (
            "# HERE",
            "raise SystemExit('needs a GPU')",
            "own_line.py:10: SystemExit: needs a GPU",
        ),
        ("    def loss(", "    def lost(", "Line in own_line.py lacks loss: see gossamer.models.task.Task"),
        ("    @dataclass(frozen=True)\n", "", "own_line.py: Line.Options is not a dataclass"),
        ("width: int = 8", "width: list = None", "Line.Options.width must be a str, int, float or bool"),
        (
            "width: int = 8",
            "width: int",
            "Line.Options.width must be a str, int, float or bool, and have a default",
        ),
        ("width: int = 8", "width: 'Int' = 8", "Line.Options: NameError: name 'Int' is not defined"),
    ],
)
def test_what_is_wrong_with_a_file(task_folder: Path, old: str, new: str, message: str) -> None:
    (task_folder / "own_broken.py").write_text("\n1 / 0")
    text = write_task(task_folder, old, new)
    with pytest.raises(TaskError) as caught:
        kind_of(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("self, options, data", "own_line.py:26: IndexError: tuple index out of range"),
        (
            "self",
            "Line(options, data): TypeError: Line.__init__() takes 1 positional argument but 3 were given",
        ),
    ],
)
def test_a_constructor_that_raises(task_folder: Path, parameters: str, message: str) -> None:
    constructor = f"    def __init__({parameters}):\n        self.x = data[0]\n\n    def build_model"
    kind = kind_of(write_task(task_folder, "    def build_model", constructor))
    with pytest.raises(TaskError) as caught:
        kind.task({})
    assert str(caught.value).endswith(message)


def test_options_that_the_task_refuses(task_folder: Path) -> None:
    kind = kind_of(write_task(task_folder))
    with pytest.raises(TaskError, match="task 'own_line:Line' refuses its options: width is 64 at most"):
        kind.task({"width": 65})


def test_defaults_of_another_type(task_folder: Path) -> None:
    assert kind_of(write_task(task_folder, "lr: float = 0.1", "lr: float = 1")).resolve({})["lr"] == 1.0
    kind = kind_of(write_task(task_folder, "width: int = 8", "width: int = 8.5"))
    with pytest.raises(
        TaskError, match=r"option 'width' of task 'own_line:Line' must be a whole number, not 8\.5"
    ):
        kind.resolve({})


def test_a_task_without_options(task_folder: Path) -> None:
    class_ = GOOD[GOOD.index("    @dataclass") : GOOD.index("    def build_model")]
    text = write_task(task_folder, class_, "")
    kind = kind_of(text)
    assert kind.resolve({}) == {}
    with pytest.raises(TaskError, match="task 'own_line:Line' has no option 'width'; it has no options"):
        kind.resolve(kind.read(["width=3"]))


@pytest.fixture
def kind(task_folder: Path) -> TaskKind:
    return kind_of(write_task(task_folder))


def test_options_as_a_command_line_has_them(kind: TaskKind) -> None:
    read = kind.read(["width=3", "lr=1e-2", "bias=True", "note=a=b"])
    assert read == {"width": 3, "lr": 0.01, "bias": True, "note": "a=b"}
    assert kind.read(["lr=1", "note="]) == {"lr": 1.0, "note": ""}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["width"], "option 'width' has no value: write it as width=VALUE"),
        (["widht=3"], "task 'own_line:Line' has no option 'widht'; did you mean 'width'? choose from"),
        (["=3"], "has no option ''"),
        (["width=3", "width=4"], "option 'width' is given twice: give it once"),
        (["width=3.5"], "option 'width' of task 'own_line:Line' must be a whole number, not '3.5'"),
        (["width="], "must be a whole number, not ''"),
        (["lr=fast"], "must be a number, not 'fast'"),
        (["lr=nan"], "must be finite"),
        (["bias=1"], "must be true or false, not '1'"),
    ],
)
def test_options_that_a_command_line_cannot_have(kind: TaskKind, settings: list[str], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        kind.resolve(kind.read(settings))
    assert message in str(caught.value)
