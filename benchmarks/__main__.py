"""Runs the benchmarks, or those named, and prints their tables; ``--json FILE`` writes the raw figures.

`attacks` trains for some twenty minutes, and `flood` for two: they run only when named.
"""

import argparse
import json
import platform
from pathlib import Path

import numpy as np

from benchmarks import attacks, codecs, flood, merging, transport

BENCHMARKS = {
    "codecs": codecs,
    "merging": merging,
    "transport": transport,
    "flood": flood,
    "attacks": attacks,
}
USUAL = ("codecs", "merging", "transport")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}")
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
        **{name: BENCHMARKS[name].run(quick=options.quick) for name in options.names or USUAL},
    }
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
