"""Tasks by name: what a manifest may say, and what is said back when it is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gossamer.models import TaskError
from gossamer.models.registry import build_task, find_kind, task_names
from gossamer.models.text import ByteTextTask, TextOptions


def test_text_is_built_with_its_options_and_data() -> None:
    task = build_task("text", {"preset": "small", "batch_size": 3, "lr": 1}, [Path("somewhere")])
    assert isinstance(task, ByteTextTask)
    assert task.options.batch_size == 3
    assert task.options.lr == 1.0 and isinstance(task.options.lr, float)
    assert task.data == (Path("somewhere"),)
    assert "text" in task_names()


def test_resolved_options_are_complete_and_build_the_same_task() -> None:
    kind = find_kind("text")
    resolved = kind.resolve({"context": 64})
    assert set(resolved) == set(TextOptions.__dataclass_fields__)
    assert resolved["context"] == 64 and resolved["batch_size"] and resolved["lr"]
    assert kind.resolve(resolved) == resolved
    again = build_task("text", resolved)
    assert isinstance(again, ByteTextTask) and again.options == TextOptions(context=64).resolved()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("txet", {}, "there is no task 'txet'; did you mean 'text'? choose from text"),
        ("vision-9", {}, "there is no task 'vision-9'; choose from text"),
        (
            "text",
            {"batchsize": 3},
            "task 'text' has no option 'batchsize'; did you mean 'batch_size'? "
            "choose from batch_size, context, eval_batches, horizon_tokens, lr, optimizer, preset, "
            "weight_decay",
        ),
        ("text", {"lr": "fast"}, "option 'lr' of task 'text' must be a number, not 'fast'"),
        ("text", {"lr": True}, "option 'lr' of task 'text' must be a number, not True"),
        ("text", {"batch_size": 1.5}, "option 'batch_size' of task 'text' must be a whole number, not 1.5"),
        ("text", {"batch_size": True}, "option 'batch_size' of task 'text' must be a whole number, not True"),
        ("text", {"preset": 1}, "option 'preset' of task 'text' must be a text, not 1"),
        ("text", {"lr": float("inf")}, "option 'lr' of task 'text' must be finite, not inf"),
        ("text", {"preset": "big"}, "there is no preset 'big'; choose from tiny, small, medium, 124m"),
        ("text", {"batch_size": -2}, "option 'batch_size' is -2: choose one from 0 to 65536"),
        ("text", {"lr": -0.1}, "option 'lr' is -0.1: choose one from 0 to 10"),
        ("text", {"eval_batches": 0}, "option 'eval_batches' is 0: choose one from 1 to 65536"),
        ("text", {"optimizer": "adam"}, "there is no optimizer 'adam'; choose from muon, adamw"),
    ],
)
def test_mistakes_are_one_clear_line(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(TaskError) as caught:
        build_task(name, options)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_importing_the_package_and_the_registry_does_not_import_torch() -> None:
    code = "import sys, gossamer.models, gossamer.models.registry; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
