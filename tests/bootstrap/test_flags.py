"""`gossamer.bootstrap.cli.flags`: a value comes from the flag, the environment, a file or the default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gossamer.bootstrap.cli.flags import takes_options
from gossamer.bootstrap.processes import NodeProcess
from gossamer.node.options import NodeOptions
from tests.bootstrap.gossamer_command import Run, in_process
from tests.command_lines import GOSSAMER, parse


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    return in_process(capsys, monkeypatch, tmp_path)


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def value(line: str, name: str) -> Any:
    return parse(line).params[name]


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert value("gossamer node", "threads") == "0"
    (tmp_path / "n.toml").write_text('threads = 1\njoin = ["file:1", "file:2"]\ninsecure-plaintext = true\n')
    assert value("gossamer node --config n.toml", "threads") == "1"
    assert value("gossamer node --config n.toml", "join") == ["file:1", "file:2"]
    assert value("gossamer node --config n.toml", "insecure_plaintext") is True
    monkeypatch.setenv("GOSSAMER_NODE_CONFIG", "n.toml")
    monkeypatch.setenv("GOSSAMER_NODE_JOIN", "a:1 b:2")
    monkeypatch.setenv("GOSSAMER_NODE_THREADS", "2")
    assert value("gossamer node", "threads") == "2"
    assert value("gossamer node", "join") == ["a:1", "b:2"]
    assert value("gossamer node --threads 3", "threads") == "3"
    assert value("gossamer node --join flag:1", "join") == ["flag:1"], "lists are not added up"
    monkeypatch.setenv("GOSSAMER_NODE_THREADS", "")
    assert value("gossamer node", "threads") == "1", "an empty variable is none"


def test_a_tilde_that_no_shell_has_expanded_is_the_home_folder() -> None:
    for command in ("id", "generate", "swarm", "status a:1"):
        assert value(f"gossamer {command} --dir=~/d", "folder") == Path.home() / "d"


def test_variables_have_the_names_of_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    for flag, text in (("DIR", "d"), ("EVALUATE_EVERY", "7"), ("INSECURE_PLAINTEXT", "1"), ("OBSERVE", "no")):
        monkeypatch.setenv(f"GOSSAMER_NODE_{flag}", text)
    found = parse("gossamer node").params
    assert (found["dir"], found["evaluate_every"]) == ("d", "7")
    assert (found["insecure_plaintext"], found["observe"]) == (True, False)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("jion = ['a:1']", ["n.toml: gossamer node has no flag --jion"]),
        ("swarm_id = 'ab'", ["no flag --swarm_id"]),
        ("config = 'x'", ["no flag --config"]),
        ("[node]\njoin = ['a:1']", ["no flag --node"]),
        ("join = 'a:1'", ["--join"]),
        ("join = ['nowhere']", ["--join: 'nowhere' is not an address"]),
        ("threads = 'x'", ["--threads: should be a valid integer"]),
        ("threads = 9999", ["--threads: should be less than or equal to 1024"]),
        ("dir = ''", ["--dir: the path is empty"]),
        ("log-level = 'loud'", ["--log-level: should be 'debug', 'info'"]),
        ("[node", ["n.toml is not valid TOML"]),
        ("a = " + "9" * 5000, ["not valid TOML"]),
        ("a = " + "[" * 100_000, ["not valid TOML"]),
    ],
)
def test_a_mistake_in_a_file_is_one_line(run: Run, tmp_path: Path, text: str, parts: list[str]) -> None:
    (tmp_path / "n.toml").write_text(text)
    run("node", "--config", "n.toml").assert_user_error(*parts)


def test_a_file_that_cannot_be_read_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, part in (("none", "No such file"), (".", "directory"), ("binary", "not valid TOML")):
        run("node", "--config", name).assert_user_error(name, part)


def test_a_command_may_have_some_options_only_with_defaults_of_its_own() -> None:
    @takes_options("name", "listen", name="b")
    def command(options: NodeOptions, other: str = "x") -> None:
        pass

    assert list(command.__annotations__) == ["other", "listen", "name", "config"]
    known = {parameter.name for parameter in GOSSAMER.commands["bootstrap"].params}
    assert {"manifest", "join", "dir", "check"} <= known and not {"data", "observe", "threads"} & known
    assert value("gossamer bootstrap m.toml", "listen") == "[::]:7700"


def test_a_local_swarm_is_not_set_by_what_the_machines_node_is_set_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, str]] = []

    class Child:
        def __init__(self, module: str, args: list[str], *, env: dict[str, str], stderr: int) -> None:
            started.append(env)

    monkeypatch.setattr("gossamer.bootstrap.processes.Child", Child)
    monkeypatch.setenv("GOSSAMER_NODE_JOIN", "elsewhere:1")
    NodeProcess("n", tmp_path / "n", ["node"]).start()
    assert started == [{"GOSSAMER_NODE_JOIN": ""}]
