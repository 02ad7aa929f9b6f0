"""What the documents name is there: tests, files, links, commands with their flags, targets, benchmarks."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import catalogue
from gossamer.bootstrap.manifests import outer_defaults
from gossamer.models.gpt import PRESETS
from gossamer.models.text import TextOptions
from gossamer.protocol import limits
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.manifest import Manifest
from tests.command_lines import parse, unknown_flags

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").glob("*.md")])
TEST = re.compile(r"`(?:tests/(?:\w+/)*)?(test_\w+)(?:\.py)?`")
FILE = re.compile(r"`((?:protocol|node|models|bootstrap|tests|examples|deploy)/[\w/.-]+\.\w+)`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_is_there(document: Path) -> None:
    text = document.read_text("utf-8")
    files = list((ROOT / "tests").rglob("test_*.py"))
    named = {path.stem for path in files} | {"test_x"}  # any file's, in docs/architecture.md
    for unknown in set(TEST.findall(text)) - named:
        assert any(f"def {unknown}(" in path.read_text("utf-8") for path in files), unknown
    assert [link for link in LINK.findall(text) if not (document.parent / link).exists()] == []
    if document.name != "CHANGELOG.md":  # which tells of what was there, too
        assert [file for file in FILE.findall(text) if not (ROOT / file).exists()] == []


def test_the_patterns_find_something() -> None:
    text = (ROOT / "docs" / "threat-model.md").read_text("utf-8")
    assert "test_uninvited" in TEST.findall(text) and "benchmarks.md" in LINK.findall(text)


TYPED = re.compile(r"^ *(gossamer .*)$", re.MULTILINE)
MENTIONED = re.compile(r"`(gossamer [^`]*)`")
BENCHMARK = re.compile(r"python -m benchmarks((?: [a-z]+)*)")
PLACEHOLDERS = {"BOOTSTRAP_ID": "ab" * 32, "NODE_ID": "ab" * 32, ":PORT": ":7700", "SWARM": "0f2aa9b7d875"}


def typed_and_mentioned(document: Path) -> tuple[list[str], list[str]]:
    """Lines to type, and commands in running text."""
    text = document.read_text("utf-8")
    blocks = "\n".join(line for line in text.splitlines() if line.startswith((" ", "gossamer ")))
    mentioned = [" ".join(found.split()) for found in MENTIONED.findall(text)]
    return [line for line in TYPED.findall(blocks) if "`" not in line], mentioned


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_commands_of_a_document_are_commands(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    typed, mentioned = typed_and_mentioned(document)
    for line in typed:
        for placeholder, meaning in PLACEHOLDERS.items():
            line = line.replace(placeholder, meaning)
        if "..." in line.split("#")[0]:
            mentioned.append(line)
        else:
            parse(line)
    for line in mentioned:
        if "COMMAND" not in line:
            assert unknown_flags(line) == set(), line


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_targets_and_benchmarks_of_a_document_are_there(document: Path) -> None:
    text = document.read_text("utf-8")
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    for code in [*re.findall(r"`([^`]*)`", text), *re.findall(r"^ {4,}(.*)$", text, re.MULTILINE)]:
        if code.startswith("make "):
            words = [word for word in code.split("#")[0].split()[1:] if re.fullmatch("[a-z-]+", word)]
            assert {word for word in words[:1] if word not in targets} == set(), code
        for names in BENCHMARK.findall(code):
            known = {benchmark.name for benchmark in catalogue.benchmarks()} | {"report"}
            assert set(names.split()) <= known, code


def test_the_patterns_for_commands_find_something() -> None:
    typed, mentioned = typed_and_mentioned(ROOT / "docs" / "operating.md")
    assert len(typed) > 8 and len(mentioned) > 15
    assert "gossamer init my.toml --name demo --preset tiny" in typed
    with pytest.raises(AssertionError, match="no command 'nod'"):
        parse("gossamer nod")
    assert unknown_flags("gossamer node --jion a:1") == {"--jion"}


UNITS = {"KiB": 2**10, "MiB": 2**20, "s": 1, "ms": 1e-3}
NOT_PROMISED = {"MESSAGE_OVERHEAD_S", "BYTE_OVERHEAD_S"}
"""What costs are estimated by, where they are not measured; no bound."""


def number(text: str) -> float:
    """What a cell of the table of limits says: "16,384", "2^31 - 1", "1 MiB + 64 KiB", "0.5 ms"."""
    total = 0.0
    for sign, term in re.findall(r"(^|[-+] )([^-+]+)", text):
        value, _, unit = term.strip().partition(" ")
        base, _, power = value.replace(",", "").partition("^")
        total += (-1 if sign == "- " else 1) * float(base) ** int(power or 1) * UNITS.get(unit, 1)
    return total


def documented_limits() -> dict[str, float]:
    """Names and values in docs/protocol.md; a value in parentheses is that of NAME_BURST or NAME_BURST_S."""
    text = (ROOT / "docs" / "protocol.md").read_text("utf-8")
    table = text[text.index("## Limits") : text.index("## Where this departs")]
    found: dict[str, float] = {}
    for row in re.findall(r"^\| (`.*?) \| (.*?) \|", table, re.MULTILINE):
        names, values = re.findall(r"`(\w+)`", row[0]), re.split(r", (?![^(]*\))", row[1])
        names = [name if name[0] != "_" else f"GREYLIST_POINTS{name}" for name in names]
        for name, value in zip(names, values, strict=True):
            steady, _, burst = value.partition(" (")
            found[name] = number(steady)
            if burst:
                stem = name.removesuffix("_PER_S").removesuffix("_S")
                known = (f"{stem}_BURST", f"{stem}_BURST_S")
                found[next(other for other in known if hasattr(limits, other))] = number(burst.rstrip(")"))
    return found


def test_the_limits_in_the_protocol_are_those_of_the_code() -> None:
    actual = {name: float(value) for name, value in vars(limits).items() if name.isupper()}
    assert documented_limits() == {n: value for n, value in actual.items() if n not in NOT_PROMISED}


def test_every_module_has_its_line_in_the_architecture() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    tables = dict(re.findall(r"^#{3,4} `([\w/]+)/`.*?\n(.*?)(?=^##)", text, re.M | re.S))
    folders = {
        path.parent
        for room in ("protocol", "node", "models", "bootstrap")
        for path in (ROOT / room).rglob("*.py")
    } | {ROOT / "benchmarks"}
    missing = []
    for folder in folders:
        inside = folder.relative_to(ROOT).as_posix()
        headed, below = (inside, "") if inside in tables else (inside.rpartition("/")[0], f"{folder.name}/")
        for path in folder.glob("*.py"):
            of_a_folder = path.name == "__init__.py" and f"`{folder.name}/`" in text
            if not of_a_folder and f"`{below}{path.name}`" not in tables[headed]:
                missing.append(f"{inside}/{path.name}")
    assert missing == []


def rows_of(heading: str) -> dict[str, list[str]]:
    """The tables of a section of docs/manifest.md: other cells by a row's first, without backticks."""
    page = (ROOT / "docs" / "manifest.md").read_text("utf-8")
    (section,) = [part for part in re.split(r"^##+ ", page, flags=re.M) if part.startswith(f"`[{heading}]`")]
    rows = [row.strip("| ").split(" | ") for row in section.splitlines() if row.startswith("| `")]
    return {row[0].strip("`"): [cell.strip("`") for cell in row[1:]] for row in rows}


@pytest.mark.parametrize("name", ["swarm", "task", "outer", "pace", "history", "admission"])
def test_every_key_of_the_manifest_is_explained_and_what_it_is_without_one(name: str) -> None:
    section: Any = Manifest.model_fields[name].annotation
    rows = rows_of(name)
    assert section.model_fields.keys() <= rows.keys()
    if name in ("outer", "pace", "history"):
        for key, field in section.model_fields.items():
            assert rows[key][1] == str(field.default), key


def test_the_options_of_the_task_and_its_presets_are_those_of_the_code() -> None:
    rows = rows_of("task.options")
    assert {field.name for field in dataclasses.fields(TextOptions)} | PRESETS.keys() == rows.keys()
    for name, config in PRESETS.items():
        options = TextOptions(preset=name).resolved()
        shape = f"{config.layers}, {config.width}, {config.heads}"
        assert rows[name][1:] == [shape, f"{options.context:,}", f"{options.batch_size}", f"{options.lr:g}"]


@pytest.mark.parametrize("codec", CODECS)
def test_the_outer_settings_by_codec_are_those_of_the_code(codec: str) -> None:
    for stated, by_mean in zip(rows_of("outer")[codec][1:], (False, True), strict=True):
        assert stated == ", ".join(map(str, outer_defaults(codec, by_mean=by_mean).values()))


PUT_TOGETHER = {
    "and no longer at",
    "cannot write or remove chunks",
    "clock and that of",
    "fetching pauses until there is space",
    "gossamer node has no such flag",
    "has no manifest / is not there",
    "invalid value for",
    "k of n",
    "publishing pauses until there is space",
    "starting it again in",
    "the held-out loss is nan",
    "the inner optimizer has different options than its saved state",
    "the inner optimizer has different parameters than its saved state",
    "this machine is at",
    "trying again in",
    "weight capped in",
}
"""Words of messages whose parts stand in several places of the code."""


def texts_of_the_code() -> Iterator[str]:
    for room in ("protocol", "node", "models", "bootstrap"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    yield "".join(str(p.value) if isinstance(p, ast.Constant) else "|" for p in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def test_the_messages_in_the_tables_are_those_of_the_code() -> None:
    """Word for word, but for names and numbers: whoever finds one in a log searches for it."""
    text = (ROOT / "docs" / "operating.md").read_text("utf-8")
    tables = text[text.index("## Messages, and what to do") : text.index("## What is not defended yet")]
    stand_in = re.compile(r"\.\.\.|[;:,()]|\.? (?=[A-Z][a-z])|\b[A-Z]+\b(?:/\S*)?|\S*\d\S*|'s? ")
    parts = [part for cell in re.findall(r"^\| (.*?) \|", tables, re.M) for part in stand_in.split(cell)]
    said = {words for part in parts if len((words := part.strip(" .'`?/").lower()).split()) > 2}
    code = "\n".join(texts_of_the_code()).lower()
    assert len(said) > 250
    assert {words for words in said if words not in code} == PUT_TOGETHER
