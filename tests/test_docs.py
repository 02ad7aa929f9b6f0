"""What the documents name is there: tests, files, links, commands with their flags, targets, benchmarks."""

import re
from pathlib import Path

import pytest

from benchmarks import catalogue
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
