"""Runs the benchmarks and prints their tables; ``--json FILE`` writes the raw figures too.

Named ones only, where any are named; `attacks` trains for some twenty minutes and runs only when named.
"""

import argparse
import json
import platform
from pathlib import Path

import numpy as np

from benchmarks import attacks, codecs, merging

BENCHMARKS = {"codecs": codecs.run, "merging": merging.run, "attacks": attacks.run}
USUAL = ("codecs", "merging")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *BENCHMARKS], help=", ".join(BENCHMARKS))
    parser.add_argument("--quick", action="store_true", help="small sizes, a few seconds in all")
    parser.add_argument("--json", type=Path, help="write the raw figures here")
    options = parser.parse_args()
    figures = {
        "machine": {
            "processor": platform.machine(),
            "python": platform.python_version(),
            "numpy": np.__version__,
        },
        **{name: BENCHMARKS[name](quick=options.quick) for name in options.names or USUAL},
    }
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
