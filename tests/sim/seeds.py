"""Many seeds on many processors, and the command that replays one.

Processes are spawned, not forked: a child shares nothing with the one that asked, not even the salt of
Python's hashes, so a result that depended on either would show.
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

from tests.sim.result import Result
from tests.sim.scenario import choose
from tests.sim.world import simulate


@dataclass(frozen=True, slots=True)
class Job:
    """One seed, and what shapes its scenario besides it."""

    seed: int
    nodes: int
    minutes: float
    name: str | None

    @property
    def replay(self) -> str:
        """The command that repeats it."""
        named = f" --scenario {self.name}" if self.name else ""
        size = f"--nodes {self.nodes} --minutes {self.minutes:g}"
        return f"python -m tests.sim --seed {self.seed} {size}{named} --trace"


def run(job: Job) -> Result:
    """Simulate one seed."""
    return simulate(choose(job.seed, job.nodes, job.minutes, job.name))


def run_all(jobs: list[Job], processes: int) -> Iterator[tuple[Job, Result]]:
    """Simulate many seeds, in the order in which they end."""
    if processes == 1:
        yield from ((job, run(job)) for job in jobs)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = {pool.submit(run, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                yield futures.pop(future), future.result()
        finally:
            pool.shutdown(cancel_futures=True)
