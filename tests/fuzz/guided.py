"""`make fuzz-guided`: libFuzzer steers by the branches of `gossamer.protocol` that inputs reach (atheris).

::

    python -m tests.fuzz.guided --minutes 1 messages records
    python -m tests.fuzz.guided --replay messages .hypothesis/guided/messages/crash-0123...

The corpus of each target grows under .hypothesis/guided, and the next run goes on with it. Half of the
changes are libFuzzer's own, half those of `mutate`. Only decoders are fuzzed: they need no torch and no disk.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from random import Random

import atheris

with atheris.instrument_imports(include=["gossamer"]):
    from tests.fuzz.decoders import DECODERS
    from tests.fuzz.target import Target

FOLDER = Path(".hypothesis/guided")
RSS_LIMIT_MIB = 1024
TIMEOUT_S = 20
BYTES_MAX = 65_536
LEFT_OUT = {"wire", "index", "toml"}
"""Targets that others cover, or whose inputs only people write."""

TARGETS = {target.name: target for target in DECODERS if target.name not in LEFT_OUT}
_FINAL = re.compile(r"#(\d+)\s+DONE\s+cov: (\d+) ft: (\d+) corp: (\d+)/(\S+)")


def child(target: Target, arguments: list[str]) -> None:
    """Fuzz one target in this process, which libFuzzer ends."""

    def mutate(data: bytes, size: int, seed: int) -> bytes:
        dice = Random(seed)
        if dice.randrange(2):
            return bytes(atheris.Mutate(data, size))
        return target.mutate(data, dice)[:size]

    def feed(data: bytes) -> None:
        target.feed(data)

    atheris.Setup([sys.argv[0], *arguments], feed, custom_mutator=mutate)
    atheris.Fuzz()


def _corpus(target: Target) -> Path:
    folder = FOLDER / target.name / "corpus"
    folder.mkdir(parents=True, exist_ok=True)
    for seed in target.seeds:
        (folder / sha256(seed).hexdigest()[:16]).write_bytes(seed)
    return folder


def run(target: Target, minutes: float) -> tuple[str, bool]:
    """Fuzz one target in a process of its own; returns a line about it, and whether it found nothing."""
    corpus = _corpus(target)
    options = [
        f"-max_total_time={int(minutes * 60)}",
        f"-rss_limit_mb={RSS_LIMIT_MIB}",
        f"-timeout={TIMEOUT_S}",
        f"-max_len={BYTES_MAX}",
        f"-artifact_prefix={FOLDER / target.name}/",
        str(corpus),
    ]
    command = [sys.executable, "-m", "tests.fuzz.guided", "--child", target.name, "--", *options]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    found = _FINAL.search(done.stderr)
    if done.returncode or found is None:
        return f"{target.name:<14} FAILED (status {done.returncode})\n{done.stderr[-6000:]}", False
    count, edges, features, kept, size = found.groups()
    return f"{target.name:<14} {count:>10} {edges:>7} {features:>9} {kept:>7} {size:>8}", True


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz.guided", description="Coverage-guided fuzzing."
    )
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; default: all")
    parser.add_argument("--minutes", type=float, default=1.0, help="for each target")
    parser.add_argument(
        "--replay", metavar="TARGET", help="feed the files given instead of targets to this one"
    )
    parser.add_argument("--child", metavar="TARGET", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(TARGETS[arguments.child], arguments.targets)
        return 0
    if arguments.replay:
        for path in arguments.targets:
            print(path, TARGETS[arguments.replay].feed(Path(path).read_bytes()).name.lower())
        return 0
    if unknown := set(arguments.targets) - set(TARGETS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(TARGETS)}")
    print(
        f"{'target':<14} {'executions':>10} {'edges':>7} {'features':>9} {'corpus':>7} {'bytes':>8}",
        flush=True,
    )
    clean = True
    for name in arguments.targets or TARGETS:
        line, passed = run(TARGETS[name], arguments.minutes)
        print(line, flush=True)
        clean = clean and passed
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
