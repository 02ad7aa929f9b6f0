"""Runs the benchmarks, or those named, and prints their tables; ``--json FILE`` writes the raw figures."""

import argparse
import json
import platform
from pathlib import Path

import numpy as np

from benchmarks import codecs, flood, merging

BENCHMARKS = {"codecs": codecs, "merging": merging, "flood": flood}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all by default"
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds in all")
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    options = parser.parse_args()
    if unknown := set(options.names) - BENCHMARKS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    figures = {
        "machine": {
            "processor": platform.machine(),
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        **{name: BENCHMARKS[name].run(quick=options.quick) for name in options.names or BENCHMARKS},
    }
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
