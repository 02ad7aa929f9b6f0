"""Each deliberately broken variant of the protocol is found within a few seeds."""

import re
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from os import cpu_count

import pytest

from gossamer.protocol import replica
from tests.sim.mutants import MUTANTS, Mutant
from tests.sim.scenario import choose
from tests.sim.world import simulate

SEEDS_MAX = 8


STALE = re.compile(r": (TypeError|AttributeError|NameError): ")
"""Exceptions caused by a patch that does not fit the code any more."""


def hunt(name: str) -> list[str]:
    """The violations that a mutant causes, seed by seed, up to the expected one."""
    mutant = MUTANTS[name]
    found = []
    with mutant.applied():
        for seed in range(1, SEEDS_MAX + 1):
            result = simulate(choose(seed, mutant.nodes, mutant.minutes, mutant.scenario))
            if result.failure:
                found.append(f"seed {seed}: {result.failure}")
                if is_stale(result.failure) or is_found(name, result.failure):
                    break
    return found


def is_stale(violation: str) -> bool:
    return STALE.search(violation) is not None


def is_found(name: str, violation: str) -> bool:
    """Whether this is the violation that a mutant should cause."""
    return re.search(MUTANTS[name].verdict, violation) is not None and not is_stale(violation)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_mutant_is_found() -> None:
    with ProcessPoolExecutor(cpu_count(), mp_context=get_context("spawn")) as pool:
        found = dict(zip(MUTANTS, pool.map(hunt, MUTANTS), strict=True))
    stale = [name for name, violations in found.items() if any(map(is_stale, violations))]
    otherwise = {name: seen for name, seen in found.items() if seen and not is_found(name, seen[-1])}
    unnoticed = [name for name, violations in found.items() if not violations]
    assert not stale, f"the code that they patch has changed: {', '.join(stale)}"
    assert not otherwise, f"found, but not for what they are about: {otherwise}"
    assert not unnoticed, f"no seed of {SEEDS_MAX} shows: {', '.join(unnoticed)}"


def test_a_mutant_of_what_is_no_more_is_refused() -> None:
    mutant = Mutant(lambda: [(replica.Replica, "no_such_method", None)], "calm", "anything")
    with pytest.raises(AssertionError, match="Replica has no no_such_method to break"), mutant.applied():
        pass


def test_a_patch_that_does_not_fit_is_no_finding() -> None:
    assert is_found("spin", "at 0.000 s: n0 spins: next_wake has not moved on")
    assert not is_found("spin", "at 0.000 s: TypeError: spins: next_wake has not moved on")
    assert not is_found("spin", "at 0.000 s: n0 has merged other records than n1")


def test_a_mutant_leaves_no_trace() -> None:
    mutant = MUTANTS["trust any signature"]
    before = [(target, name, getattr(target, name)) for target, name, _ in mutant.patches()]
    with mutant.applied():
        assert all(getattr(target, name) is not original for target, name, original in before)
    assert all(getattr(target, name) is original for target, name, original in before)
