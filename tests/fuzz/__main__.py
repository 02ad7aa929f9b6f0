"""`make fuzz`: feeds many inputs to every target and counts them, or replays one input.

::

    python -m tests.fuzz --inputs 100000 --seed 7 --jobs 2 --targets replica records
    python -m tests.fuzz --targets replica --input .hypothesis/fuzz/replica-0123456789ab
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from tests.fuzz.runs import TARGETS, Job, Outcome, replay, run
from tests.fuzz.target import Depth

PART = 2000
"""Inputs per job at most. A target has several jobs, so that all cores have work."""


def plan(names: list[str], total: int, seed_: int) -> list[Job]:
    """Split the inputs over the targets by their shares, and into jobs, longest jobs first."""
    shares = sum(TARGETS[name].share for name in names)
    jobs: list[Job] = []
    for name in names:
        left = -int(-total * TARGETS[name].share // shares)
        jobs += [
            Job(name, seed_ + part, min(PART, left - part * PART), giants=part == 0)
            for part in range(-(-left // PART))
        ]
    return sorted(jobs, key=lambda job: job.name != "replica")


def _table(outcomes: dict[str, Outcome]) -> str:
    lines = [
        f"{'target':<14} {'inputs':>8} {'past 1st check':>15} {'accepted':>9} {'slowest':>9} {'a second':>9}"
    ]
    total = Outcome()
    for name, outcome in [*outcomes.items(), ("all", total)]:
        count = max(1, outcome.inputs)
        deep = outcome.inputs - outcome.depths[Depth.SHALLOW]
        accepted = outcome.depths[Depth.ACCEPTED]
        lines.append(
            f"{name:<14} {outcome.inputs:>8} {deep / count:>14.0%} {accepted / count:>9.0%}"
            f" {outcome.slowest_s * 1000:>6.0f} ms {outcome.inputs / max(outcome.seconds, 1e-9):>9.0f}"
        )
        if outcome is not total:
            total.add(outcome)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Hostile bytes for every target."
    )
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=None, help="default: a new one each time")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--targets", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--input", help="a file: feed this one input to the one target, and nothing else")
    arguments = parser.parse_args()
    if arguments.input:
        depth = replay(arguments.targets[0], Path(arguments.input).read_bytes())
        print(f"{arguments.targets[0]}: no failure ({depth.name.lower()})")
        return 0
    seed_ = random.SystemRandom().randrange(2**31) if arguments.seed is None else arguments.seed
    names = " ".join(arguments.targets) if arguments.targets != list(TARGETS) else ""
    again = f"python -m tests.fuzz --inputs {arguments.inputs} --seed {seed_}" + (
        f" --targets {names}" if names else ""
    )
    print(f"seed {seed_} (replay: {again})", flush=True)
    begun = time.monotonic()
    outcomes = {name: Outcome() for name in arguments.targets}
    jobs = plan(arguments.targets, arguments.inputs, seed_)
    context = get_context("spawn")
    # Log lines about each file that a node cannot use would bury the table.
    with ProcessPoolExecutor(arguments.jobs, mp_context=context, initializer=logging.disable) as pool:
        running = {pool.submit(run, job): job for job in jobs}
        for future in as_completed(running):
            outcomes[running[future].name].add(future.result())
    print(_table(outcomes))
    failures = [failure for outcome in outcomes.values() for failure in outcome.failures]
    for failure in failures:
        print(failure)
    count = sum(outcome.inputs for outcome in outcomes.values())
    print(f"{count} inputs in {time.monotonic() - begun:.0f} s, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
