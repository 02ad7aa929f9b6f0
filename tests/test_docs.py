"""What the documents name is there: tests, files of the tree, and the documents that they link to."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
TEST = re.compile(r"`(?:tests/(?:\w+/)*)?(test_\w+)(?:\.py)?`")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_names_is_there(document: Path) -> None:
    text = document.read_text("utf-8")
    files = list((ROOT / "tests").rglob("test_*.py"))
    named = {path.stem for path in files} | {"test_x"}  # any file's, in docs/architecture.md
    for unknown in set(TEST.findall(text)) - named:
        assert any(f"def {unknown}(" in path.read_text("utf-8") for path in files), unknown
    assert [link for link in LINK.findall(text) if not (document.parent / link).exists()] == []


def test_the_patterns_find_something() -> None:
    text = (ROOT / "docs" / "threat-model.md").read_text("utf-8")
    assert "test_uninvited" in TEST.findall(text) and "attacks.md" in LINK.findall(text)
