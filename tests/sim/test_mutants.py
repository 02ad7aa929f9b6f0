"""Each deliberately broken variant of the protocol is found out within a few seeds."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from os import cpu_count

import pytest

from tests.sim.mutants import MUTANTS
from tests.sim.scenario import choose
from tests.sim.world import simulate

SEEDS_MAX = 8


def hunt(name: str) -> str | None:
    """The first violation that a mutant commits, None if no seed shows one."""
    mutant = MUTANTS[name]
    with mutant.applied():
        for seed in range(1, SEEDS_MAX + 1):
            result = simulate(choose(seed, mutant.nodes, mutant.minutes, mutant.scenario))
            if result.failure:
                return f"seed {seed}: {result.failure}"
    return None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_mutant_is_found() -> None:
    with ProcessPoolExecutor(cpu_count(), mp_context=get_context("spawn")) as pool:
        found = dict(zip(MUTANTS, pool.map(hunt, MUTANTS), strict=True))
    unnoticed = [name for name, violation in found.items() if violation is None]
    stale = [name for name, violation in found.items() if violation and "TypeError" in violation]
    assert not stale, f"the code that they patch has changed: {', '.join(stale)}"
    assert not unnoticed, f"no seed of {SEEDS_MAX} shows: {', '.join(unnoticed)}"


def test_a_mutant_leaves_no_trace() -> None:
    mutant = MUTANTS["trust any signature"]
    before = [(target, name, getattr(target, name)) for target, name, _ in mutant.patches()]
    with mutant.applied():
        assert all(getattr(target, name) is not original for target, name, original in before)
    assert all(getattr(target, name) is original for target, name, original in before)
