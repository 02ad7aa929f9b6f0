"""`gossamer init`: what it writes is whole, fits together, and replaces nothing unless told."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_model

from gossamer.bootstrap import genesis as genesis_file
from gossamer.models.registry import build_task
from gossamer.models.task_file import parse_task_file
from gossamer.node.inputs import read_manifest
from gossamer.node.trainer import genesis
from tests.bootstrap.gossamer_command import Run, entries, in_process
from tests.models.own_tasks import write_task


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    return in_process(capsys, monkeypatch, tmp_path)


def test_init_says_what_a_shell_understands(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "my swarm.toml"
    assert f"gossamer bootstrap '{path}'" in run("init", path, "--preset", "tiny").out


def test_init_writes_what_bootstrap_reads(run: Run, tmp_path: Path) -> None:
    outcome = run("init", "my.toml", "--fragments", 2, "--codec", "topk")
    assert outcome.status == 0
    manifest = read_manifest(tmp_path / "my.toml")
    assert manifest.swarm_id.hex() in outcome.out
    assert (manifest.swarm.name, manifest.outer.codecs[0].name, manifest.layout.fragments) == (
        "my",
        "topk",
        2,
    )
    assert entries(tmp_path) == {"my.toml"}


def test_init_replaces_a_manifest_only_when_told(run: Run, tmp_path: Path) -> None:
    assert run("init", "my.toml").status == 0
    before = (tmp_path / "my.toml").read_text()
    run("init", "my.toml", "--name", "other").assert_user_error("my.toml", "--force")
    assert (tmp_path / "my.toml").read_text() == before
    assert run("init", "my.toml", "--name", "other", "--force").status == 0
    assert read_manifest(tmp_path / "my.toml").swarm.name == "other"
    (tmp_path / "folder").mkdir()
    run("init", "folder", "--force").assert_user_error("folder")
    assert entries(tmp_path) == {"my.toml", "folder"}


def test_init_with_a_task_of_ones_own(run: Run, task_folder: Path, tmp_path: Path) -> None:
    text = write_task(task_folder)
    outcome = run("init", "my.toml", "--task", text, "--option", "width=4", "--option", "lr=0.5")
    assert outcome.status == 0 and "my.genesis.safetensors" in outcome.out
    manifest = read_manifest(tmp_path / "my.toml")
    assert manifest.task.name == "own_line:Line"
    assert manifest.task.options == {"width": 4, "lr": 0.5, "bias": False, "note": "-"}
    assert manifest.task.source == parse_task_file(text).source()
    phi = genesis_file.read(manifest, tmp_path / "my.genesis.safetensors")
    assert phi.size == 4 * 8 + 4 + 4 + 1
    assert str(tmp_path) not in (tmp_path / "my.toml").read_text()

    # Going on from there, in a swarm of its own.
    outcome = run(
        "init",
        "on.toml",
        "--task",
        text,
        "--option",
        "width=4",
        "--from",
        "my.genesis.safetensors",
        "--seed",
        7,
    )
    assert outcome.status == 0
    assert read_manifest(tmp_path / "on.toml").genesis == manifest.genesis
    outcome = run("init", "on.toml", "--task", text, "--from", "my.genesis.safetensors", "--force")
    outcome.assert_user_error("tensor '0.weight' has shape [4, 8], but [8, 8] in the model")


def test_init_with_existing_weights(run: Run, tmp_path: Path) -> None:
    assert run("init", "one.toml").status == 0
    model = build_task("text", {}).build_model(5)
    save_model(model, str(tmp_path / "w.safetensors"))
    run("init", "two.toml", "--from", "gone").assert_user_error("--from gone: no such file")
    with torch.no_grad():
        next(iter(model.parameters()))[0] = torch.nan
    save_model(model, str(tmp_path / "nan.safetensors"))
    run("init", "two.toml", "--from", "nan.safetensors").assert_user_error(
        "tensor 'model.embed_tokens.weight': a value is not finite"
    )
    model = build_task("text", {}).build_model(5)
    assert run("init", "two.toml", "--from", "w.safetensors").status == 0
    two = read_manifest(tmp_path / "two.toml")
    assert two.genesis != read_manifest(tmp_path / "one.toml").genesis
    phi = genesis_file.read(two, tmp_path / "two.genesis.safetensors")
    assert (phi == genesis.parameters(model, two.plan())).all()


def test_an_option_that_has_its_own_flag_is_given_once(run: Run, tmp_path: Path) -> None:
    outcome = run("init", "my.toml", "--option", "preset=5", "--preset", "4")
    outcome.assert_user_error("option 'preset' is given twice: give it once")
    assert not (tmp_path / "my.toml").exists()


@pytest.mark.parametrize("path", [".", "..", "/", "home"])
def test_init_wants_a_file(run: Run, tmp_path: Path, path: str) -> None:
    (tmp_path / "home").mkdir()
    run("init", path, "--invited", "--force").assert_user_error("is a folder; name a file")
    assert entries(tmp_path) == {"home"}


def test_no_manifest_takes_the_place_of_an_owners_key(run: Run, tmp_path: Path) -> None:
    assert run("init", "my.toml", "--preset", "tiny", "--invited").status == 0
    key = (tmp_path / "my.owner").read_bytes()
    for more in ([], ["--invited"]):
        run("init", "my.owner", "--force", *more).assert_user_error("my.owner: *.owner are owners' keys")
    assert (tmp_path / "my.owner").read_bytes() == key


def test_what_init_writes_may_be_read_by_whom_the_umask_lets(
    run: Run, task_folder: Path, tmp_path: Path
) -> None:
    """A manifest is for everybody: another user runs the node, maybe. The owner's key is for one."""
    before = os.umask(0o022)
    try:
        assert run("init", "own.toml", "--task", write_task(task_folder), "--invited").status == 0
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob("own.*")}
    assert modes == {"own.toml": 0o644, "own.genesis.safetensors": 0o644, "own.owner": 0o600}


def test_init_keeps_first_parameters_unless_told(run: Run, tmp_path: Path) -> None:
    (tmp_path / "my.genesis.safetensors").write_text("precious")
    run("init", "my.toml").assert_user_error("my.genesis.safetensors already exists", "--force")
    assert run("init", "my.toml", "--force").status == 0
    assert entries(tmp_path) == {"my.toml"}, "of a manifest that is no more"


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--option", "width=many"], ["option 'width' of task 'own_line:Line' must be a whole number"]),
        (["--preset", "tiny"], ["has no option 'preset'; choose from bias, lr, note, width"]),
        (["--option", "width=65"], ["refuses its options: width is 64 at most"]),
        (["--option", "lr=1e300"], ["the step that init tries: RuntimeError"]),
        (["--option", "note=\N{BELL}"], []),
    ],
)
def test_what_an_own_task_is_told(
    run: Run, task_folder: Path, tmp_path: Path, args: list[object], parts: list[str]
) -> None:
    text = write_task(task_folder)
    outcome = run("init", "my.toml", "--task", text, "--invited", *args)
    if not parts:
        assert outcome.status == 0
        assert read_manifest(tmp_path / "my.toml").task.options["note"] == "\N{BELL}"
        return
    outcome.assert_user_error(*parts)
    assert entries(tmp_path) == {"own_line.py"}, "nothing half-written"


def test_init_tries_an_own_task_out_where_there_is_data(run: Run, task_folder: Path) -> None:
    text = write_task(
        task_folder, "numbers = stream.generator(stream.skip_batches)", "numbers = open(self.data[0])"
    )
    run("init", "my.toml", "--task", text).assert_user_error(
        "own_line.py:32: IndexError: tuple index out of range", "--data, or --no-trial"
    )
    run("init", "my.toml", "--task", text, "--data", "x").assert_user_error("--data", "x")
    assert run("init", "my.toml", "--task", text, "--no-trial").status == 0


def test_an_init_that_fails_leaves_no_key(run: Run, tmp_path: Path) -> None:
    run("init", "my.toml", "--invited", "--preset", "huge").assert_user_error("huge")
    assert entries(tmp_path) == set()
    (tmp_path / "my.owner").write_bytes(bytes(32))
    run("init", "my.toml", "--invited").assert_user_error("my.owner already exists", "--owner-key")
    assert entries(tmp_path) == {"my.owner"}


def test_the_same_data_on_all_nodes_is_part_of_the_manifest(
    run: Run, tmp_path: Path, task_folder: Path
) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("all nodes have these words\n" * 400)
    small = ("--option", "context=16", "--option", "batch_size=2")
    assert run("init", "my.toml", "--data", corpus, "--same-data", *small).status == 0
    data = read_manifest(tmp_path / "my.toml").data
    assert data.samples == data.blocks > 500
    assert len(data.digest) == 64
    own = write_task(task_folder)
    outcome = run("init", "other.toml", "--task", own, "--same-data")
    assert outcome.status == 2
    assert "cannot share its data out" in outcome.err
