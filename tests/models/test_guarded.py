"""`gossamer.models.checking`: a mistake in somebody's own task is one line that says where it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from gossamer.models import checking as guarded
from gossamer.models.checking import Guarded, explaining
from gossamer.models.errors import TaskError
from gossamer.models.task import DataStream, Task
from gossamer.models.task_file import kind_of
from gossamer.models.text import ByteTextTask
from gossamer.protocol import limits
from tests.models.own_tasks import write_task

STREAM = DataStream(seed=0, node_id=b"x")


def load(folder: Path, old: str = "", new: str = "") -> Task:
    return kind_of(write_task(folder, old, new)).task({})


def go_through(task: Task) -> None:
    """Call every method once, as the trainer does."""
    model = task.build_model(0)
    task.build_optimizer(model)
    batches = task.batches(STREAM)
    batch = next(batches)
    task.loss(model, batch)
    task.tokens(batch)
    task.evaluate(model)
    task.lr_scale(0)
    task.averaging(model, "0.weight", next(model.parameters()))


def test_a_good_task_passes(task_folder: Path) -> None:
    go_through(load(task_folder))


def test_what_it_trains_on_is_told_as_the_task_has_it(task_folder: Path) -> None:
    task = kind_of(write_task(task_folder)).task({}, data=(Path("/data/corpus"),))
    assert isinstance(task, Guarded) and task.data_in_words() == "/data/corpus"
    task.inner.data = None  # type: ignore[assignment]
    assert task.data_in_words() == "data of the task's own choice"
    own = Guarded(InWords(), Path("x.py"))
    assert own.data_in_words() == "shards 1 to 3 of 8"


def test_batches_that_are_forgotten_to_be_returned() -> None:
    class Forgetful(ByteTextTask):
        def batches(self, stream: DataStream) -> None:  # type: ignore[override]
            """Its last line is missing."""

    with pytest.raises(TaskError, match=r"Forgetful.batches returned None: yield its items, or return"):
        next(Guarded(Forgetful(), Path("x.py")).batches(STREAM))


@pytest.mark.parametrize("method", ["data_in_words", "pretrained_files"])
def test_what_is_only_told_may_hold_a_mistake_too(method: str) -> None:
    class Mistaken(ByteTextTask):
        def data_in_words(self) -> str:
            raise KeyError("shards")

        def pretrained_files(self) -> dict[str, bytes]:
            raise KeyError("config")

    with pytest.raises(TaskError, match=rf"in {method}: KeyError: '(shards|config)'"):
        getattr(Guarded(Mistaken(), Path(__file__)), method)()


class InWords(ByteTextTask):
    def data_in_words(self) -> str:
        return "shards 1 to 3 of 8"


MODEL = "return nn.Sequential(nn.Linear(8, self.options.width), nn.Linear(self.options.width, 1))"
LOSS = "return (model(inputs) - targets).square().mean()"
EVALUATE = "return float(self.loss(model, (inputs, inputs.sum(1, keepdim=True))))"
OPTIMIZER = "return torch.optim.SGD(model.parameters(), lr=self.options.lr)"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (MODEL, "return nn.Linear('x', 1)", "own_line.py:{line}, in build_model: TypeError: empty()"),
        (MODEL, "return None", "Line.build_model returned None: return a torch.nn.Module"),
        (MODEL, "return nn.ReLU()", "build_model made a model without parameters that require a gradient"),
        (MODEL, "return nn.Linear(8, 1).requires_grad_(False)", "without parameters that require a gradient"),
        (
            MODEL,
            "return nn.Linear(8, 1).bfloat16()",
            "made 'weight' torch.bfloat16: build the model in float32",
        ),
        (MODEL, "return nn.Linear(8, 1, device='meta')", "put 'weight' on meta: build the model on the CPU"),
        (MODEL, "return nn.LazyLinear(1)", "left 'weight' without a shape"),
        (
            OPTIMIZER,
            "return model.parameters()",
            "build_optimizer returned a generator",
        ),
        (
            OPTIMIZER,
            "return []",
            "returned a list: return a torch.optim.Optimizer, or several",
        ),
        (OPTIMIZER, "return [torch.optim.SGD(model.parameters()), None]", "build_optimizer returned a list"),
        (
            OPTIMIZER,
            "return [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]",
            "gave one parameter to two optimizers",
        ),
        (
            OPTIMIZER,
            "made = torch.optim.SGD(model.parameters()); made.param_groups[0]['lr'] = None; return made",
            "an optimizer without a learning rate 'lr'",
        ),
        (OPTIMIZER, "return torch.optim.SGD([])", "in build_optimizer: ValueError: optimizer got an empty"),
        (
            OPTIMIZER,
            "return torch.optim.SGD(nn.Linear(1, 1).parameters())",
            "an optimizer for other parameters",
        ),
        ("for _ in range(4)", "for _ in range(0)", "Line.batches yielded nothing: is there data"),
        ("for _ in range(4)", "for _ in None", "own_line.py:{line}, in batches: TypeError: 'NoneType'"),
        (LOSS, "return (model(inputs) - targets)[0, 0].item()", "loss returned "),
        (
            LOSS,
            "return (model(inputs) - targets).square()",
            "returned a tensor of shape [16, 1]: return a scalar",
        ),
        (LOSS, "return torch.zeros(())", "loss returned a tensor without gradient"),
        (
            LOSS,
            "return model(inputs.T).mean()",
            "own_line.py:{line}, in loss: RuntimeError: mat1 and mat2 shapes",
        ),
        (LOSS, "raise KeyError", "own_line.py:{line}, in loss: KeyError"),
        (LOSS, "raise SystemExit(1)", "own_line.py:{line}, in loss: SystemExit: 1"),
        (LOSS, "raise StopIteration", "own_line.py:{line}, in loss: StopIteration"),
        ("return len(batch[0])", "return 0", "tokens returned 0: return a whole number from 1"),
        ("return len(batch[0])", "return 2.5", "tokens returned 2.5"),
        ("return len(batch[0])", "return True", "tokens returned True"),
        ("return len(batch[0])", "return 2**41", "tokens returned 2199023255552: return a whole number from"),
        ("return len(batch[0])", "return None", "tokens returned None"),
        (EVALUATE, "return", "evaluate returned None: return the held-out loss, a number"),
        (EVALUATE, "return model(inputs)", "evaluate returned a tensor of shape [8, 1]"),
        (
            "# HERE",
            "Task.lr_scale = lambda self, tokens: -1",
            "lr_scale returned -1: return a factor of 0 or",
        ),
        ("# HERE", "Task.lr_scale = lambda *_: torch.ones(2)", "lr_scale returned a tensor of shape [2]"),
        ("# HERE", "Task.lr_scale = lambda *_: 'x'", "lr_scale returned a str: return a factor"),
        ("# HERE", "Task.pretrained_files = lambda self: {}", "pretrained_files returned no config.json"),
        (
            "# HERE",
            "Task.pretrained_files = lambda self: ['a']",
            "pretrained_files returned a list: return a dict of names and bytes",
        ),
        ("# HERE", "Task.averaging = lambda *_: 'sum'", "averaging returned 'sum' for '0.weight'"),
    ],
)
def test_a_mistake_is_one_line(
    task_folder: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, message: str
) -> None:
    monkeypatch.setattr(Task, "lr_scale", Task.lr_scale)  # some of these set them
    monkeypatch.setattr(Task, "averaging", Task.averaging)
    monkeypatch.setattr(Task, "pretrained_files", lambda self: {"config.json": b"{}"})
    with pytest.raises(TaskError) as caught:
        task = load(task_folder, old, new)
        go_through(task)
        task.pretrained_files()
    lines = (task_folder / "own_line.py").read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if new in text)
    assert message.replace("{line}", str(line)) in str(caught.value)
    assert str(caught.value).startswith("own_line.py") and "\n" not in str(caught.value)


def test_a_fault_in_a_file_beside_it_is_named_there(task_folder: Path) -> None:
    (task_folder / "own_losses.py").write_text("def square(x):\n    return x.nothing\n")
    task = load(task_folder, LOSS, "import own_losses; return own_losses.square(inputs)")
    with pytest.raises(TaskError, match=r"^own_losses\.py:2, in loss: AttributeError"):
        go_through(task)


def test_a_fault_in_a_package_installed_beside_it_is_named_where_the_task_calls_it(task_folder: Path) -> None:
    """As where ``.venv`` lies in the task's own folder."""
    packages = task_folder / ".venv" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "own_installed.py").write_text("def square(x):\n    return x.nothing\n")
    new = f"import sys; sys.path.append({str(packages)!r})\n        import own_installed\n"
    task = load(task_folder, LOSS, f"{new}        return own_installed.square(inputs)")
    with pytest.raises(TaskError, match=r"^own_line\.py:\d+, in loss: AttributeError"):
        go_through(task)


def test_what_the_task_says_itself_is_said_as_it_is(task_folder: Path) -> None:
    new = "from gossamer.models.errors import TaskError; raise TaskError('no images in here')"
    with pytest.raises(TaskError, match="^no images in here$"):
        go_through(load(task_folder, LOSS, new))


def test_a_long_message_of_many_lines_is_one_line(task_folder: Path) -> None:
    task = load(task_folder, LOSS, r"raise ValueError('a\n\tb\x1b[2J' + 'c' * 5000)")
    with pytest.raises(TaskError) as caught:
        go_through(task)
    assert "ValueError: a b\N{REPLACEMENT CHARACTER}[2Jccc" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_torchs_generator_is_seeded_for_the_model_and_left_alone(task_folder: Path) -> None:
    task = load(task_folder)
    before = torch.random.get_rng_state()
    first, again, other = task.build_model(1), task.build_model(1), task.build_model(2)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(first[0].weight, again[0].weight)
    assert not torch.equal(first[0].weight, other[0].weight)


def test_one_pass_after_another_each_with_other_data(task_folder: Path) -> None:
    batches = load(task_folder).batches(STREAM)
    inputs = torch.stack([next(batches)[0] for _ in range(12)])
    assert len(inputs.flatten(1).unique(dim=0)) == 12
    again = load(task_folder).batches(STREAM)
    assert torch.equal(torch.stack([next(again)[0] for _ in range(12)]), inputs)


def test_a_resumed_node_goes_through_its_data_in_other_orders(task_folder: Path) -> None:
    starts = [replace(STREAM, skip_batches=skip) for skip in (0, 6, 12)]
    runs = [load(task_folder).batches(stream) for stream in starts]
    inputs = torch.stack([next(batches)[0] for batches in runs for _ in range(12)])  # three passes each
    assert len(inputs.flatten(1).unique(dim=0)) == 36


def test_a_resumed_node_whose_pass_is_over_begins_another(task_folder: Path) -> None:
    skipped = load(task_folder, "for _ in range(4)", "for _ in range(4 - stream.skip_batches)")
    batches = skipped.batches(DataStream(seed=0, node_id=b"x", skip_batches=9))
    assert len(next(batches)[0]) == 16


@pytest.mark.parametrize("number", ["torch.tensor(0.5)", "__import__('numpy').float32(0.5)"])
def test_a_factor_of_any_kind_of_number(
    task_folder: Path, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Task, "lr_scale", Task.lr_scale)  # the file sets it
    task = load(task_folder, "# HERE", f"Task.lr_scale = lambda *_: {number}")
    assert task.lr_scale(0) == 0.5


def test_a_model_in_eval_mode_is_trained_and_one_with_parts_in_it_is_left_so(task_folder: Path) -> None:
    whole = load(task_folder, MODEL, MODEL + ".eval()").build_model(0)
    assert all(module.training for module in whole.modules())
    build = MODEL.replace("return ", "model = ") + "; model[0].eval(); return model"
    part = load(task_folder, MODEL, build).build_model(0)
    assert [module.training for module in part.modules()] == [True, False, True]


def test_evaluation_needs_no_care(task_folder: Path) -> None:
    new = "assert not model.training and not torch.is_grad_enabled(); model[0].train(); return 1"
    task = load(task_folder, EVALUATE, new)
    model = task.build_model(0)
    model[1].eval()
    assert task.evaluate(model) == 1.0
    assert [module.training for module in model.modules()] == [True, True, False]
    assert torch.is_grad_enabled()


def test_text_in_pieces(task_folder: Path) -> None:
    def sampling(body: str) -> Task:
        return load(
            task_folder,
            "    def tokens",
            f"    def sample(self, *_, **__):\n        {body}\n\n    def tokens",
        )

    model = nn.Linear(1, 1)
    arguments = {"temperature": 1.0, "seed": 0}
    assert "".join(sampling("return 'abc'").sample(model, "", 3, **arguments)) == "abc"
    pieces = sampling("yield 'a'; 1 / 0").sample(model, "", 3, **arguments)
    assert next(pieces) == "a"
    with pytest.raises(TaskError, match=r"own_line\.py:42, in sample: ZeroDivisionError"):
        next(pieces)
    with pytest.raises(TaskError, match="Line does not generate text"):
        load(task_folder).sample(model, "", 3, **arguments)


def test_only_a_guarded_tasks_steps_are_explained(task_folder: Path) -> None:
    task = load(task_folder)
    assert isinstance(task, Guarded)
    said = r"^own_line\.py, in the backward pass: RuntimeError: out of memory$"
    with pytest.raises(TaskError, match=said), explaining(task, "in the backward pass"):
        raise RuntimeError("out of memory")
    with (
        pytest.raises(RuntimeError, match="out of memory"),
        explaining(ByteTextTask(), "in the backward pass"),
    ):
        raise RuntimeError("out of memory")


def test_a_step_has_at_most_the_tokens_that_a_record_can_say() -> None:
    """Two rooms that do not import each other agree."""
    assert guarded.TOKENS_MAX == limits.TOKENS_MAX
