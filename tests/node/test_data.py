"""`gossamer.node.trainer.data`: rates by the swarm's tokens, samples by node, and which task is run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gossamer.bootstrap import manifests
from gossamer.node.exports.generate import generate
from gossamer.node.home import Home, manifest_of
from gossamer.node.trainer import data as own_task
from gossamer.node.trainer.data import Schedule, Shard, constant, cosine, linear
from gossamer.protocol.errors import ConfigError
from gossamer.protocol.manifest import from_values
from tests.models.own_tasks import write_task
from tests.node.folders import Folder
from tests.protocol import builders

# -- rates


def test_cosine() -> None:
    schedule = cosine(1_000, floor=0.1)
    assert [schedule(t) for t in (0, 500, 1_000, 10**12)] == pytest.approx([1.0, 0.55, 0.1, 0.1])


def test_linear() -> None:
    schedule = linear(1_100, warm_up_tokens=100)
    assert [schedule(t) for t in (100, 600, 1_100, 5_000)] == pytest.approx([1.0, 0.5, 0.0, 0.0])


@pytest.mark.parametrize(
    "schedule",
    [constant(warm_up_tokens=100), linear(200, warm_up_tokens=100), cosine(200, warm_up_tokens=100)],
)
def test_warm_up_rises_from_nearly_nothing_to_all(schedule: Schedule) -> None:
    values = [schedule(t) for t in range(0, 101, 10)]
    assert 0 < values[0] <= 0.01
    assert values == sorted(values)
    assert values[-1] == 1.0


@pytest.mark.parametrize(
    "make",
    [
        lambda: cosine(0),
        lambda: linear(10, warm_up_tokens=10),
        lambda: cosine(10, floor=1.5),
        lambda: constant(warm_up_tokens=-1),
    ],
)
def test_a_schedule_that_cannot_be(make: object) -> None:
    with pytest.raises(ConfigError):
        make()  # type: ignore[operator]


# -- samples


def test_an_epoch_is_every_sample_once_and_the_next_is_another_order() -> None:
    shard = Shard(100, node_id=b"a")
    first, second = list(shard), list(shard)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert list(Shard(100, node_id=b"a")) == first, "the same node, the same order"
    assert list(Shard(100, node_id=b"a", begun_at=5)) != first, "a resumed node draws afresh"
    assert list(Shard(100, node_id=b"b")) != first


def test_a_part_is_a_nodes_own_and_lasts() -> None:
    parts = [Shard(1000, node_id=node, fraction=0.25) for node in (b"a", b"b")]
    assert [len(part) for part in parts] == [250, 250]
    drawn = [set(part) for part in parts]
    assert len(drawn[0]) == 250 and drawn[0] != drawn[1]
    assert set(parts[0]) == drawn[0] == set(parts[0].indices.tolist())
    assert set(Shard(1000, node_id=b"a", fraction=0.25, begun_at=9)) == drawn[0]


def test_ranks_draw_equal_parts_without_overlap() -> None:
    shards = [Shard(103, node_id=b"a", rank=rank, ranks=4) for rank in range(4)]
    drawn = [list(shard) for shard in shards]
    assert [len(part) for part in drawn] == [len(shard) for shard in shards] == [25] * 4
    assert len(set().union(*drawn)) == 100


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 0},
        {"fraction": 0.0},
        {"fraction": 1.5},
        {"fraction": np.array([0.5, 0.5])},
        {"size": 1, "ranks": 2},
    ],
)
def test_what_cannot_be(wrong: dict[str, object]) -> None:
    settings = {"size": 10, "node_id": b"a", **wrong}
    with pytest.raises(ConfigError):
        Shard(settings.pop("size"), **settings)  # type: ignore[arg-type]


# -- tasks


@pytest.fixture
def text(task_folder: Path) -> str:
    return write_task(task_folder)


@pytest.fixture
def home(text: str, tmp_path: Path) -> Home:
    """A node of a swarm that trains `text`, which nobody has told where that is."""
    manifest, phi = manifests.create(
        name="lines",
        task=text,
        options={"width": 4},
        codec="int4",
        every_steps=4,
        every_seconds=0.0,
        fragments=1,
        seed=0,
    )
    return Folder(tmp_path / "node", manifest, phi).home


def named(name: str, tmp_path: Path) -> Home:
    values: dict[str, Any] = builders.manifest().model_dump()
    home = Home(tmp_path / "other")
    home.create()
    home.adopt(from_values({**values, "task": {"name": name}}, "test"))
    return home


def test_it_is_remembered_where_the_task_lies(
    home: Home, text: str, task_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(task_folder)
    own_task.remember_task(home, "own_line.py:Line")
    assert Home(home.root).task() == text, "absolute, so that restarts from anywhere find it"
    monkeypatch.chdir("/")
    own_task.check_trainable(home)
    task = own_task.build_task(home, manifest_of(home))
    assert next(task.build_model(0).parameters()).shape == (4, 8)


def test_without_being_told_nothing_is_run_and_the_line_says_what_to_type(
    home: Home, task_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(task_folder)
    write_task(task_folder, "# HERE", "raise AssertionError('run')")
    advice = (
        "swarm 'lines' trains 'own_line:Line', a custom task of its owner: get its file from them, read"
        " it, and give it with --task own_line.py:Line"
    )
    with pytest.raises(ConfigError) as caught:
        own_task.check_trainable(home)
    assert str(caught.value) == f"{advice}; or hold a replica with --observe"
    with pytest.raises(ConfigError) as caught:  # as generate and export do, which have no such flag
        own_task.build_task(home, manifest_of(home))
    assert str(caught.value) == advice


@pytest.mark.parametrize("name", ["{folder}/own_line.py:Line", "$(reboot):Line", "own_line", "custom"])
def test_a_manifest_that_names_a_file_or_a_command_gets_neither(
    task_folder: Path, tmp_path: Path, name: str
) -> None:
    write_task(task_folder, "# HERE", "raise AssertionError('run')")
    home = named(name.format(folder=task_folder), tmp_path)
    with pytest.raises(ConfigError, match="a script of its own: join with Peer.attach") as caught:
        own_task.check_trainable(home)
    assert "--task" not in str(caught.value)
    with pytest.raises(ConfigError, match="script of its own"):
        own_task.build_task(home, manifest_of(home))


def test_a_task_that_comes_with_gossamer_needs_no_file(text: str, tmp_path: Path) -> None:
    home = named("text", tmp_path)
    own_task.check_trainable(home)
    with pytest.raises(ConfigError, match="trains 'text', which comes with Gossamer: leave --task out"):
        own_task.remember_task(home, text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("missing.py:Line", "the swarm's task: there is no file missing.py"),
        ("own_line.py:Lime", "trains 'own_line:Line', but own_line.py:Lime is 'own_line:Lime'"),
        ("other.py:Line", "trains 'own_line:Line', but other.py:Line is 'other:Line'"),
        ("own_line", "the swarm's task: name your own task as FILE.py:CLASS"),
    ],
)
def test_another_task_than_the_swarms_is_not_remembered(
    home: Home, task_folder: Path, monkeypatch: pytest.MonkeyPatch, given: str, message: str
) -> None:
    monkeypatch.chdir(task_folder)
    (task_folder / "other.py").write_text("")
    with pytest.raises(ConfigError) as caught:
        own_task.remember_task(home, given)
    assert message in str(caught.value) and home.task() is None


def test_a_file_that_was_changed_is_said_and_used(
    home: Home, text: str, task_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own_task.remember_task(home, text)
    with caplog.at_level(logging.WARNING):
        own_task.check_trainable(home)
        assert not caplog.records
        write_task(task_folder, "# HERE", "# a comment")
        own_task.check_trainable(home)
    assert "is not the file that the manifest was written with" in caplog.text
    own_task.build_task(home, manifest_of(home))


def test_text_from_a_file_that_makes_another_model_now_is_refused(
    home: Home, text: str, task_folder: Path
) -> None:
    own_task.remember_task(home, text)
    write_task(task_folder, "nn.Linear(8, self.options.width)", "nn.Linear(8, 5), nn.Linear(5, 4)")
    with pytest.raises(ConfigError, match=r"'0.weight' has shape \[5, 8\]; the manifest says \[4, 8\]"):
        next(generate(home, "a", 3, temperature=0.0, seed=0))


def test_a_mistake_that_shows_while_text_is_written_is_one_line(
    home: Home, text: str, task_folder: Path
) -> None:
    own_task.remember_task(home, text)
    sample = "def sample(self, model, prompt, length, *, temperature, seed):"
    write_task(
        task_folder,
        "    def tokens(",
        f"    {sample}\n        yield prompt\n        raise ValueError('no more')\n\n    def tokens(",
    )
    pieces = generate(home, "a", 3, temperature=0.0, seed=0)
    assert next(pieces) == "a"
    with pytest.raises(ConfigError, match=r"own_line\.py:\d+: ValueError: no more"):
        next(pieces)
