"""Runs the benchmarks, or those named, and prints their tables and goals.

`python -m benchmarks report` instead writes docs/benchmarks.md and its plots from the figures recorded there.
"""

import argparse
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import machine, report
from benchmarks.catalogue import Benchmark, benchmarks


def main() -> None:
    known = {benchmark.name: benchmark for benchmark in benchmarks()}
    options = _options(known)
    if options.names == ["report"]:
        for missing in report.write():
            print(missing, file=sys.stderr)
        return
    figures: dict[str, Any] = {"machine": machine.describe()}
    for name in options.names or [benchmark.name for benchmark in known.values() if benchmark.usual]:
        module = known[name].load()
        if (reason := getattr(module, "why_not", lambda: None)()) is not None:
            print(f"{name}: not possible here: {reason}", file=sys.stderr)
            continue
        figures[name] = module.run(quick=options.quick, **({"anew": True} if options.anew else {}))
        _show(module, figures[name])
        if options.record:
            report.record(name, figures[name])
        if options.json is not None:
            options.json.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")


def _options(known: dict[str, Benchmark]) -> argparse.Namespace:
    lines = [
        f"  {b.name:14} {b.minutes:4g} min{'' if b.usual else '  only when named'}" for b in known.values()
    ]
    parser = argparse.ArgumentParser(
        prog="benchmarks",
        description=__doc__,
        epilog="benchmarks, and about how long a full run takes:\n" + "\n".join(lines),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of those below; or `report`")
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that they run")
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    parser.add_argument("--record", action="store_true", help="write them to docs/benchmarks/NAME.json")
    parser.add_argument("--anew", action="store_true", help="learning: do not take runs from its record")
    options = parser.parse_args()
    if options.names != ["report"] and (unknown := set(options.names) - known.keys()):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if options.anew and options.names != ["learning"]:
        parser.error("--anew is for `learning` alone: nothing else is taken from a record")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        parser.error(f"--json {options.json}: there is no folder {options.json.parent}")
    if options.quick and options.record:
        parser.error("quick figures are not recorded: they show that a benchmark runs, and no more")
    return options


def _show(module: ModuleType, figures: Any) -> None:
    for table in module.tables(figures) if hasattr(module, "tables") else ():
        table.show()
    for goal in getattr(module, "GOALS", ()):
        verdict = "met   " if goal.is_met(figures) else "missed"
        print(f"{verdict} {goal.what}: {goal.measured_text(figures)}; goal {goal.bound_text()}", flush=True)


if __name__ == "__main__":
    main()
