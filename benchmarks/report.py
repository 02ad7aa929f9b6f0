"""The generated parts of docs/benchmarks.md and of the pages beside the figures, made from what is recorded.

No measured value in them is typed by hand. A page's own sentences stand around blocks
``<!-- figures: NAME -->`` ... ``<!-- end -->``, and `write` fills each block anew: a benchmark's tables and
plots, the table of all `goals`, and the list of `machines`.
"""

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.catalogue import RECORDED, Benchmark

DOCS = Path(__file__).parents[1] / "docs"
BLOCK = re.compile(r"^<!-- figures: (\S+) -->\n.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)


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
    """Draw all plots and fill the blocks of all pages; returns what they lack, in words."""
    for benchmark, figures in _measured(docs):
        module = benchmark.load()
        if hasattr(module, "plot"):
            module.plot(figures, docs / "benchmarks")
    for page in pages(docs):
        page.write_text(compose(page), "utf-8")
    return list(_lacking(docs))


def pages(docs: Path = DOCS) -> list[Path]:
    """docs/benchmarks.md, and those beside the figures."""
    return [docs / "benchmarks.md", *sorted((docs / "benchmarks").glob("*.md"))]


def compose(page: Path) -> str:
    """A whole page: its own text, with every block filled from what is recorded."""
    docs = page.parent if page.name == "benchmarks.md" else page.parents[1]
    known = {benchmark.name: benchmark for benchmark in RECORDED}

    def fill(block: re.Match[str]) -> str:
        name = block[1]
        match name:
            case "goals":
                inside = _goals(docs)
            case "machines":
                inside = _machines(docs)
            case _:
                inside = _figures(known[name], docs, page)
        return f"<!-- figures: {name} -->\n\n{inside.strip()}\n\n<!-- end -->"

    return BLOCK.sub(fill, page.read_text("utf-8"))


def _measured(docs: Path) -> Iterator[tuple[Benchmark, Any]]:
    """Benchmarks that have been recorded, with their figures."""
    for benchmark in RECORDED:
        found = recorded(benchmark.name, docs)
        if found is not None:
            yield benchmark, found["figures"]


def _lacking(docs: Path) -> Iterator[str]:
    """Benchmarks that were never recorded or have no block, and goals missed without a reason."""
    shown = {block[1] for page in pages(docs) for block in BLOCK.finditer(page.read_text("utf-8"))}
    for benchmark in RECORDED:
        if recorded(benchmark.name, docs) is None:
            yield f"{benchmark.name}: not measured yet (python -m benchmarks {benchmark.name} --record)"
        if benchmark.name not in shown:
            yield f"{benchmark.name}: no page has a block for it"
    for benchmark, figures in _measured(docs):
        for goal in getattr(benchmark.load(), "GOALS", ()):
            if not goal.is_met(figures) and not goal.reason:
                yield f"{benchmark.name}: '{goal.what}' is missed, and its `reason` is empty"


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
    lines, reasons = ["| goal | | measured | | benchmark |", "| --- | --- | --- | --- | --- |"], []
    for benchmark, figures in _measured(docs):
        for goal in getattr(benchmark.load(), "GOALS", ()):
            met = goal.is_met(figures)
            verdict = "met" if met else "**missed**"
            cells = (goal.what, goal.bound_text(), goal.measured_text(figures), verdict)
            lines.append(f"| {' | '.join(cells)} | {benchmark.name} |")
            if not met:
                reasons.append(_item(f"*{goal.what}*: {goal.reason or 'not explained yet.'}"))
    why = "Why those that are missed are:\n\n" + "\n".join(reasons) if reasons else ""
    return "\n".join(lines) + "\n\n" + why


def _figures(benchmark: Benchmark, docs: Path, page: Path) -> str:
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
    to = "benchmarks/" if page.parent == docs else ""
    images = [f"![{path.stem.replace('-', ' ')}]({to}{path.name})" for path in plots]
    repeat = f"{command}, about {benchmark.minutes:g} min; [figures]({to}{benchmark.name}.json)."
    return "\n\n".join(part.strip() for part in (*images, *tables, repeat))
