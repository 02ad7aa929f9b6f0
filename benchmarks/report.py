"""docs/benchmarks.md, made from the figures recorded in docs/benchmarks/ and the text written there.

No measured value in it is typed by hand: tables, goals and plots come from the recorded figures.
"""

import json
import os
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.catalogue import SECTIONS, Benchmark, Section

DOCS = Path(__file__).parents[1] / "docs"
PLACE = re.compile(r"^<!-- figures: (\S+) -->$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")


def record(name: str, figures: Any, docs: Path = DOCS) -> None:
    """Keep a benchmark's figures, with the machine that they were measured on."""
    recorded = {"machine": machine.describe(), "figures": figures}
    path = docs / "benchmarks" / f"{name}.json"
    path.write_text(json.dumps(recorded, indent=1) + "\n", "utf-8")


def recorded(name: str, docs: Path = DOCS) -> dict[str, Any] | None:
    """What `record` wrote; None if it did not."""
    path = docs / "benchmarks" / f"{name}.json"
    return json.loads(path.read_text("utf-8")) if path.exists() else None


def write(docs: Path = DOCS) -> list[str]:
    """Draw all plots and write docs/benchmarks.md; returns what it lacks, in words."""
    for benchmark, figures in _measured(docs):
        module = benchmark.load()
        if hasattr(module, "plot"):
            module.plot(figures, docs / "benchmarks")
    (docs / "benchmarks.md").write_text(compose(docs), "utf-8")
    return list(_lacking(docs))


def compose(docs: Path = DOCS) -> str:
    """The whole document."""
    introduction = _words("introduction", docs)
    sections = [_section(section, docs) for section in SECTIONS]
    parts = ["# Benchmarks", introduction, _machines(docs), "## Goals", _goals(docs), *sections]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _measured(docs: Path) -> Iterator[tuple[Benchmark, Any]]:
    """Benchmarks that have been recorded, with their figures."""
    for section in SECTIONS:
        for benchmark in section.benchmarks:
            found = recorded(benchmark.name, docs)
            if found is not None:
                yield benchmark, found["figures"]


def _lacking(docs: Path) -> Iterator[str]:
    """Benchmarks that were never recorded, and goals that were missed without a reason given."""
    for section in SECTIONS:
        for benchmark in section.benchmarks:
            if recorded(benchmark.name, docs) is None:
                yield f"{benchmark.name}: not measured yet (python -m benchmarks {benchmark.name} --record)"
    for benchmark, figures in _measured(docs):
        for goal in getattr(benchmark.load(), "GOALS", ()):
            if not goal.is_met(figures) and not goal.reason:
                yield f"{benchmark.name}: '{goal.what}' is missed, and its `reason` is empty"


def _words(name: str, docs: Path) -> str:
    """A part written by hand, with its links changed to work from docs/benchmarks.md."""
    path = docs / "benchmarks" / f"{name}.md"
    text = path.read_text("utf-8") if path.exists() else ""
    return LINK.sub(lambda found: f"]({os.path.normpath('benchmarks/' + found[1])})", text)


def _machines(docs: Path) -> str:
    """Which machine measured what."""
    found: dict[str, list[str]] = {}
    for benchmark, _ in _measured(docs):
        words = machine.in_words((recorded(benchmark.name, docs) or {})["machine"])
        found.setdefault(words, []).append(benchmark.name)
    if len(found) == 1:
        return f"All of it was measured on one machine: {next(iter(found))}."
    return "\n".join(_item(f"{', '.join(names)}: {words}") for words, names in found.items())


def _item(text: str) -> str:
    """A list item, wrapped to the line length of the other documents."""
    return textwrap.fill(
        text, 120, initial_indent="* ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _goals(docs: Path) -> str:
    """The table of all goals, and the reasons for those missed."""
    lines, reasons = ["| goal | | measured | | command |", "| --- | --- | --- | --- | --- |"], []
    for benchmark, figures in _measured(docs):
        for goal in getattr(benchmark.load(), "GOALS", ()):
            met = goal.is_met(figures)
            verdict = "met" if met else "**missed**"
            cells = (goal.what, goal.bound_text(), goal.measured_text(figures), verdict)
            lines.append(f"| {' | '.join(cells)} | `python -m benchmarks {benchmark.name}` |")
            if not met:
                reasons.append(_item(f"*{goal.what}*: {goal.reason or 'not explained yet.'}"))
    why = "Why those that are missed are:\n\n" + "\n".join(reasons) if reasons else ""
    return "\n".join(lines) + "\n\n" + why


def _section(section: Section, docs: Path) -> str:
    """A section's text, with tables and plots in their places, or at the end if the text names none."""
    text = _words(section.name, docs)
    named = set(PLACE.findall(text))
    ends = [f"<!-- figures: {b.name} -->" for b in section.benchmarks if b.name not in named]
    text = "\n\n".join(filter(None, [text.strip(), *ends]))
    known = {benchmark.name: benchmark for benchmark in section.benchmarks}
    return f"## {section.title}\n\n" + PLACE.sub(lambda found: _figures(known[found[1]], docs), text)


def _figures(benchmark: Benchmark, docs: Path) -> str:
    """A benchmark's command, tables and plots."""
    found = recorded(benchmark.name, docs)
    command = f"`python -m benchmarks {benchmark.name}`"
    if found is None:
        return f"{command} (about {benchmark.minutes:g} minutes): not measured yet."
    module = benchmark.load()
    tables = [t.markdown() for t in module.tables(found["figures"])] if hasattr(module, "tables") else []
    plots = sorted({*(docs / "benchmarks").glob(f"{benchmark.name}.svg")}) + sorted(
        (docs / "benchmarks").glob(f"{benchmark.name}-*.svg")
    )
    images = [f"![{path.stem.replace('-', ' ')}](benchmarks/{path.name})" for path in plots]
    repeat = (
        f"{command}, about {benchmark.minutes:g} minutes; [raw figures](benchmarks/{benchmark.name}.json)."
    )
    return "\n\n".join(part.strip() for part in (*images, *tables, repeat))
