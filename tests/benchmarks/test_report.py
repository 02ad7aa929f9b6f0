"""docs/benchmarks.md is what the recorded figures make it, and the report says what is missing."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import catalogue, report
from benchmarks.__main__ import main
from benchmarks.goals import Goal, amount
from benchmarks.tables import Table

FIGURES = {"speed": 80.0, "size": 3}


@pytest.fixture
def docs(tmp_path, monkeypatch):
    """A folder of documents with one benchmark recorded and one not."""
    module = SimpleNamespace(
        GOALS=(
            Goal(what="fast", at_least=50, unit="M/s", measured=lambda f: f["speed"]),
            Goal(what="small", at_most=2, measured=lambda f: f["size"], reason="it grew."),
        ),
        tables=lambda f: [Table("both", ("a", "b"), [("x", str(f["size"]))])],
        plot=lambda f, folder: (folder / "here.svg").write_text("<svg/>"),
    )
    monkeypatch.setattr(catalogue.Benchmark, "load", lambda self: module)
    pair = (catalogue.Benchmark("here", "", 1), catalogue.Benchmark("absent", "", 1))
    monkeypatch.setattr(report, "RECORDED", pair)
    (tmp_path / "benchmarks").mkdir()
    blocks = {name: f"<!-- figures: {name} -->\nold\n<!-- end -->" for name in ("goals", "here", "absent")}
    words = f"{blocks['goals']}\n\nBefore.\n\n{blocks['here']}\n\nAfter.\n\n{blocks['absent']}\n"
    (tmp_path / "benchmarks.md").write_text(words)
    report.record("here", FIGURES, tmp_path)
    return tmp_path


def test_the_document_has_goals_words_tables_and_plots(docs):
    lacking = report.write(docs)
    text = (docs / "benchmarks.md").read_text()
    assert "| fast | at least 50 M/s | 80 M/s | met | here |" in text
    assert "| small | at most 2 | 3 | **missed** |" in text and "* *small*: it grew." in text
    assert "old" not in text
    order = [
        text.index(part) for part in ("Before", "benchmarks/here.svg", "| x | 3 |", "After", "not measured")
    ]
    assert order == sorted(order)
    assert len(lacking) == 1 and lacking[0].startswith("absent")


def test_a_benchmark_without_a_block_is_said(docs):
    (docs / "benchmarks.md").write_text("Nothing.\n")
    assert "here: no page has a block for it" in report.write(docs)


def test_a_goal_missed_without_a_reason_is_said(docs):
    module = catalogue.Benchmark("here", "", 1).load()
    module.GOALS = (Goal(what="small", at_most=2, measured=lambda f: f["size"]),)
    assert any("reason" in line for line in report.write(docs))


def test_a_record_names_the_machine_and_no_date(docs):
    kept = json.loads((docs / "benchmarks" / "here.json").read_text())
    assert kept["figures"] == FIGURES
    assert {"processor", "cores", "python"} <= kept["machine"].keys()


def test_amounts():
    assert [amount(x, "s") for x in (1234.5, 12.345, 1.0, 0.99851, 0.0)] == [
        "1,234 s",
        "12.3 s",
        "1 s",
        "0.9985 s",
        "0 s",
    ]


@pytest.mark.parametrize("page", report.pages(), ids=lambda page: page.name)
def test_a_published_page_is_up_to_date(page):
    assert page.read_text("utf-8") == report.compose(page)


def test_a_folder_that_is_not_there_is_said_before_the_run(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("sys.argv", ["benchmarks", "--json", str(tmp_path / "missing" / "x.json")])
    with pytest.raises(SystemExit):
        main()
    assert "there is no folder" in capsys.readouterr().err
