"""``python -m tests.sim``: run seeds in parallel, show how it goes, and say how to replay what failed."""

import argparse
import sys
import time
from os import cpu_count

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.sim.faults import STORMS
from tests.sim.scenario import OTHERS, choose
from tests.sim.seeds import Job, run_all
from tests.sim.world import Result, simulate

FAILURES_SHOWN_MAX = 10


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many seeds to run (20)")
    parser.add_argument("--first", type=int, default=1, help="the first of them (1)")
    parser.add_argument("--seed", type=int, help="run this seed only")
    parser.add_argument("--nodes", type=int, default=16, help="members at the start (16)")
    parser.add_argument("--minutes", type=float, default=10.0, help="virtual minutes (10)")
    parser.add_argument("--scenario", help=f"one of {', '.join((*OTHERS, *STORMS))}")
    parser.add_argument("--jobs", type=int, default=cpu_count() or 1, help="processes (one per processor)")
    parser.add_argument("--trace", action="store_true", help="with --seed: tell what happens, line by line")
    return parser.parse_args()


def _summary(results: list[Result], wall_s: float) -> str:
    recoveries = sorted((took, name) for result in results for name, took in result.recoveries) or [
        (0.0, "-")
    ]
    virtual, cpu = sum(r.virtual_s for r in results), sum(r.cpu_s for r in results)
    events = sum(r.events for r in results)
    seeds = f"{len(results)} seeds in {wall_s:.0f} s ({60 * len(results) / wall_s:.0f} a minute)"
    speed = f"{virtual / cpu:.0f} times real time and {events / cpu / 1000:.0f} k events/s on one core"
    work = f"{sum(r.rounds for r in results)} rounds, {sum(r.deltas for r in results)} deltas"
    took = f"median {recoveries[len(recoveries) // 2][0]:.1f} s, longest {recoveries[-1][0]:.1f} s"
    control = f"{max(r.control_bytes_per_s for r in results) / 1024:.1f} KiB/s of control per node at most"
    wakes = f"{max(r.wakes_per_s for r in results):.1f} wakes/s at most"
    refused = f"{sum(r.damaged_refused for r in results)} damaged messages refused"
    return (
        f"{seeds}: {virtual / 3600:.1f} virtual hours, {speed}\n"
        f"{work}; {len(recoveries)} recoveries: {took} (after {recoveries[-1][1]})\n"
        f"{control}; {wakes}; {refused}"
    )


def main() -> int:
    arguments = _arguments()
    console = Console()
    first, count = (arguments.seed, 1) if arguments.seed is not None else (arguments.first, arguments.seeds)
    jobs = [
        Job(seed, arguments.nodes, arguments.minutes, arguments.scenario)
        for seed in range(first, first + count)
    ]
    begun = time.monotonic()
    if arguments.trace:
        job = jobs[0]
        result = simulate(choose(job.seed, job.nodes, job.minutes, job.name), print)
        print(f"trace {result.trace}")
        outcomes = [(job, result)]
    else:
        outcomes = []
        columns = (TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=len(jobs))
            for outcome in run_all(jobs, min(arguments.jobs, len(jobs))):
                outcomes.append(outcome)
                progress.advance(task)
                if outcome[1].failure:
                    progress.console.print(f"seed {outcome[0].seed}: {outcome[1].failure}", highlight=False)
    failed = [outcome for outcome in outcomes if outcome[1].failure]
    print(_summary([result for _, result in outcomes], time.monotonic() - begun))
    for job, result in sorted(failed, key=lambda outcome: outcome[0].seed)[:FAILURES_SHOWN_MAX]:
        print(f"\nFAILED seed {job.seed} ({result.about})\n  {result.failure}\n  replay: {job.replay}")
    if failed:
        print(f"\n{len(failed)} of {len(outcomes)} seeds failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
