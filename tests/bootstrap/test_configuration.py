"""Flags, environment variables and node files: every value of every command may come from each of them."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer

from gossamer.bootstrap.cli import main as cli
from gossamer.bootstrap.processes import NodeProcess
from gossamer.bootstrap.settings import flag_of, key_of, settable, settings_of, variable_of
from gossamer.node.home import nodes_root
from gossamer.protocol.errors import ConfigError

GOSSAMER: Any = typer.main.get_command(cli.app)
COMMANDS = sorted(name for name, command in GOSSAMER.commands.items() if hasattr(command, "takes_file"))


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GOSSAMER_HOME", str(tmp_path / "home"))


def parse(name: str, *args: object) -> typer.Context:
    """The command with all its values, not run."""
    parent = typer.Context(GOSSAMER, info_name="gossamer")
    return GOSSAMER.commands[name].make_context(name, list(map(str, args)), parent=parent)


def value(ctx: typer.Context, key: str) -> Any:
    return next(setting.value for setting in settings_of(ctx) if setting.key == key)


def unparsed(name: str) -> typer.Context:
    parent = typer.Context(GOSSAMER, info_name="gossamer")
    return typer.Context(GOSSAMER.commands[name], info_name=name, parent=parent)


def allowed(parameter: Any, there: Path) -> Any:
    """A value that the parameter takes, as TOML holds it."""
    kind = parameter.type_descriptor
    annotation = kind.annotation.__args__[0] if kind.is_list else kind.annotation
    samples: dict[Any, Any] = {bool: True, int: 1, float: 1.5, Path: str(there)}
    text = parameter.default if isinstance(parameter.default, str) else ""
    text = {"swarm_id": "0f2a", "averaging": "mean", "trust": "ab" * 32}.get(parameter.name, text)
    sample = samples.get(annotation, text or "127.0.0.1:7700")
    return [sample] if kind.is_list else sample


@pytest.mark.parametrize("name", COMMANDS)
def test_every_value_may_come_from_each_source(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctx = unparsed(name)
    values = {parameter: allowed(parameter, tmp_path) for parameter in settable(ctx)}
    assert values

    lines = [f"{key_of(parameter)} = {json.dumps(value)}" for parameter, value in values.items()]
    (tmp_path / "n.toml").write_text("\n".join([f"[{name}]", *lines]))
    assert {setting.source for setting in settings_of(parse(name, "--config", "n.toml"))} == {"file"}

    for parameter, value in values.items():
        text = value[0] if isinstance(value, list) else str(value)
        monkeypatch.setenv(variable_of(ctx, parameter), text)
    found = settings_of(parse(name, "--config", "n.toml"))
    assert {setting.source for setting in found} == {"environment"}

    flags: list[object] = []
    for parameter, value in values.items():
        said = value[0] if isinstance(value, list) else value
        is_argument = not flag_of(parameter).startswith("--")
        flags += (
            [said] if is_argument else [flag_of(parameter)] if value is True else [flag_of(parameter), said]
        )
    assert {setting.source for setting in settings_of(parse(name, *flags, "--config", "n.toml"))} == {"flag"}


def test_a_folder_of_somebody_elses_is_left_to_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which says so of what it needs there, and not of a node file that nobody has spoken of."""
    look = os.stat

    def others(path: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(tmp_path / "theirs")):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return look(path, **options)

    monkeypatch.setattr(os, "stat", others)
    assert value(parse("export", "--dir", str(tmp_path / "theirs"), "out"), "dir") == tmp_path / "theirs"


def test_names_are_those_of_the_flags() -> None:
    ctx = unparsed("node")
    variables = {variable_of(ctx, parameter) for parameter in settable(ctx)}
    assert {
        "GOSSAMER_NODE_DIR",
        "GOSSAMER_NODE_EVALUATE_EVERY",
        "GOSSAMER_NODE_INSECURE_PLAINTEXT",
    } <= variables
    assert "manifest" in map(key_of, settable(unparsed("bootstrap")))


def test_a_flag_beats_a_variable_beats_the_file_beats_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert value(parse("node"), "threads") == 0
    (tmp_path / "n.toml").write_text('[node]\nthreads = 1\njoin = ["file:1", "file:2"]\n')
    assert value(parse("node", "--config", "n.toml"), "threads") == 1
    monkeypatch.setenv("GOSSAMER_CONFIG", "n.toml")
    assert value(parse("node"), "threads") == 1
    (tmp_path / "other.toml").write_text("[node]\nthreads = 4\n")
    assert value(parse("node", "--config", "other.toml"), "threads") == 4
    monkeypatch.setenv("GOSSAMER_NODE_THREADS", "2")
    assert value(parse("node"), "threads") == 2
    assert value(parse("node", "--threads", 3), "threads") == 3
    assert value(parse("node", "--join", "flag:1"), "join") == ["flag:1"], "lists are not added up"
    monkeypatch.setenv("GOSSAMER_NODE_THREADS", "")
    assert value(parse("node"), "threads") == 1, "an empty variable is none"


def test_lists_and_switches_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a b").mkdir()
    monkeypatch.setenv("GOSSAMER_NODE_JOIN", "a:1  b:2")
    monkeypatch.setenv("GOSSAMER_NODE_DATA", f"{tmp_path}:{tmp_path / 'a b'}")
    ctx = parse("node")
    assert value(ctx, "join") == ["a:1", "b:2"]
    assert value(ctx, "data") == [tmp_path, tmp_path / "a b"]
    for text, meant in (("1", True), ("true", True), ("no", False), ("0", False)):
        monkeypatch.setenv("GOSSAMER_NODE_OBSERVE", text)
        assert value(parse("node"), "observe") is meant


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "etc" / "texts").mkdir(parents=True)
    file = tmp_path / "etc" / "n.toml"
    file.write_text('[node]\ndir = "d"\ndata = ["texts", "/"]\ninvite = "letter"\nname = "n"\n')
    ctx = parse("node", "--config", file)
    assert value(ctx, "dir") == tmp_path / "etc" / "d"
    assert value(ctx, "data") == [tmp_path / "etc" / "texts", Path("/")]
    assert value(ctx, "invite") == str(tmp_path / "etc" / "letter")
    assert value(ctx, "name") == "n"
    file.write_text('[node]\ninvite = "gossamer-invitation:abc"\ndir = "~/d"\n')
    ctx = parse("node", "--config", file)
    assert value(ctx, "invite") == "gossamer-invitation:abc"
    assert value(ctx, "dir") == Path.home() / "d"
    file.write_text('[node]\ninvite = """\n  gossamer-invitation:abc\n  def\n"""\n')
    assert value(parse("node", "--config", file), "invite").split() == ["gossamer-invitation:abc", "def"]


def test_so_is_the_file_of_a_task(tmp_path: Path) -> None:
    file = tmp_path / "etc" / "n.toml"
    file.parent.mkdir()
    for text, wanted in (
        ("my.py:Mine", f"{file.parent}/my.py:Mine"),
        ("/a/my.py:Mine", "/a/my.py:Mine"),
        ("~/my.py:Mine", f"{Path.home()}/my.py:Mine"),
        ("text", "text"),
    ):
        file.write_text("".join(f'[{name}]\ntask = "{text}"\n' for name in ("node", "init", "swarm")))
        assert value(parse("node", "--config", file), "task") == wanted
        assert value(parse("init", "m.toml", "--config", file), "task") == wanted
        assert value(parse("swarm", "--config", file), "task") == wanted
    assert value(parse("node", "--task", "my.py:Mine"), "task") == "my.py:Mine"


def test_the_file_in_the_folder_counts_without_being_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "node.toml").write_text("[node]\nthreads = 4\n[bootstrap]\nname = 'b'\n")
    assert value(parse("node", "--dir", "d"), "threads") == 4
    assert value(parse("bootstrap", "m.toml", "--dir", "d"), "name") == "b"
    monkeypatch.setenv("GOSSAMER_NODE_DIR", "d")
    assert value(parse("node"), "threads") == 4
    (tmp_path / "n.toml").write_text("[node]\nrounds = 5\n")
    ctx = parse("node", "--config", "n.toml")
    assert (value(ctx, "threads"), value(ctx, "rounds")) == (0, 5), "one file counts, not two"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[node]\njion = ['a:1']", ["[node] jion", "did you mean join?"]),
        ("[node]\nswarm_id = 'ab'", ["[node] swarm_id", "did you mean swarm-id?"]),
        ("[node]\nconfig = 'x'", ["[node] config"]),
        ("[nod]", ["[nod]", "did you mean node?"]),
        ("join = ['a:1']", ["join", "[node]"]),
        ("[node]\njoin = 'a:1'", ["[node] join", "a list"]),
        ("[node]\njoin = [1]", ["[node] join", "a list"]),
        ("[node]\nthreads = '4'", ["[node] threads", "a whole number"]),
        ("[node]\nthreads = true", ["[node] threads", "a whole number"]),
        ("[node]\nthreads = 1.0", ["[node] threads", "a whole number"]),
        ("[node]\nobserve = 1", ["[node] observe", "true or false"]),
        ("[node]\ndir = 1", ["[node] dir", "a path in quotes"]),
        ("[node]\ndir = ''", ["[node] dir", "a path in quotes"]),
        ("[node]\ndata = ['a', '']", ["[node] data", "a list", "a path in quotes"]),
        ("[node", ["not valid TOML"]),
        ("a = " + "9" * 5000, ["not valid TOML"]),
        ("a = " + "[" * 100_000, ["not valid TOML"]),
        ("\0", ["not valid TOML"]),
    ],
)
def test_a_file_that_cannot_be(tmp_path: Path, text: str, parts: list[str]) -> None:
    (tmp_path / "n.toml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse("node", "--config", "n.toml")
    assert "\n" not in str(caught.value)
    for part in ["n.toml", *parts]:
        assert part in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "large").write_bytes(b"#" * 1_048_577)
    for name, part in (("none", "none"), (".", "directory"), ("binary", "not text"), ("large", "too large")):
        with pytest.raises(ConfigError, match=part):
            parse("node", "--config", name)


def test_help_is_given_whatever_the_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "n.toml").write_text("junk")
    with pytest.raises(typer.Exit):
        parse("node", "--config", "n.toml", "--help")
    assert "--join" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "wrong", "part"),
    [
        ("threads", "9999", "1024"),
        ("join", "nowhere", "HOST:PORT"),
        ("listen", "nowhere", "HOST:PORT"),
        ("admin", "nowhere", "HOST:PORT"),
        ("data", "missing", "no such file"),
        ("log-level", "loud", "debug, info, warning, error"),
    ],
)
def test_a_wrong_value_says_where_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, wrong: str, part: str
) -> None:
    is_list = key in ("join", "data")
    text = wrong if key == "threads" else json.dumps([wrong] if is_list else wrong)
    (tmp_path / "n.toml").write_text(f"[node]\n{key} = {text}\n")
    with pytest.raises(typer.BadParameter) as in_file:
        parse("node", "--config", "n.toml")
    variable = f"GOSSAMER_NODE_{key.upper().replace('-', '_')}"
    monkeypatch.setenv(variable, wrong)
    with pytest.raises(typer.BadParameter) as in_variable:
        parse("node")
    with pytest.raises(typer.BadParameter) as in_flag:
        parse("node", f"--{key}", wrong)
    said = [error.value.format_message() for error in (in_file, in_variable, in_flag)]
    assert [part in line for line in said] == [True] * 3
    assert [f"{key} in n.toml" in said[0], variable in said[1], f"--{key}" in said[2]] == [True] * 3


def test_a_local_swarm_is_not_set_by_what_the_machines_node_is_set_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, str]] = []

    class Child:
        def __init__(self, module: str, args: list[str], *, env: dict[str, str], stderr: int) -> None:
            started.append(env)

    monkeypatch.setattr("gossamer.bootstrap.processes.Child", Child)
    monkeypatch.setenv("GOSSAMER_CONFIG", "n.toml")
    monkeypatch.setenv("GOSSAMER_NODE_JOIN", "elsewhere:1")
    NodeProcess("n", tmp_path / "n", ["node"]).start()
    assert started == [{"GOSSAMER_CONFIG": "", "GOSSAMER_NODE_JOIN": ""}]
    for name, empty in started[0].items():
        monkeypatch.setenv(name, empty)
    assert value(parse("node"), "join") in (None, [])


def test_a_tilde_that_no_shell_has_seen_is_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    (tmp_path / "me" / "texts").mkdir(parents=True)
    monkeypatch.setenv("GOSSAMER_NODE_DATA", "~/texts")
    (tmp_path / "me" / "d").mkdir()
    (tmp_path / "me" / "d" / "node.toml").write_text("[node]\nthreads = 2\n")
    ctx = parse("node", "--dir=~/d")
    assert value(ctx, "dir") == tmp_path / "me" / "d"
    assert value(ctx, "data") == [tmp_path / "me" / "texts"]
    assert value(ctx, "threads") == 2
    monkeypatch.setenv("GOSSAMER_CONFIG", "~/d/node.toml")
    assert value(parse("node"), "threads") == 2
    monkeypatch.setenv("GOSSAMER_HOME", "~/nodes")
    assert nodes_root() == tmp_path / "me" / "nodes"


def test_a_home_folder_that_nobody_knows_is_left_as_it_is_written() -> None:
    assert value(parse("node", "--dir=~nobody-has-this-name/d"), "dir") == Path("~nobody-has-this-name/d")
