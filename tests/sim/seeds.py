"""Many seeds on many processors, and the command that replays one.

Processes are spawned, not forked: a child shares nothing with its parent, not even the salt of Python's
hashes. So a result that depended on either would show.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from multiprocessing import get_context

from tests.sim.scenario import choose
from tests.sim.world import Result, simulate


@dataclass(frozen=True, slots=True)
class Job:
    """One seed, and the arguments that shape its scenario beside it."""

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


def run_all(jobs: Iterable[Job], processes: int) -> Iterator[tuple[Job, Result]]:
    """Simulate many seeds. Yields results as they end; takes each job when a processor is free."""
    if processes == 1:
        yield from ((job, run(job)) for job in jobs)
        return
    jobs = iter(jobs)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(run, job): job for job in islice(jobs, processes)}
        try:
            while running:
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    running.update((pool.submit(run, job), job) for job in islice(jobs, 1))
                    yield running.pop(future), future.result()
        finally:
            pool.shutdown(cancel_futures=True)
