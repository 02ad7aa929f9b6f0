"""The model of goodput: it gives what is published, and what its closed form says."""

import pytest

from benchmarks.goodput import CHIPS, LEARNERS, PUBLISHED, expected, methods, simulate


@pytest.mark.parametrize("method", methods(5.0), ids=lambda method: method.name)
@pytest.mark.parametrize("learners", LEARNERS)
def test_the_simulation_agrees_with_the_closed_form(method, learners):
    found = simulate(method, CHIPS[-1], learners, interruptions=200_000)
    assert found == pytest.approx(expected(method, CHIPS[-1], learners), abs=0.005)


def test_the_fit_gives_what_is_published():
    by_name = {method.name: method for method in methods(5.0)}
    for (name, learners), goodput in PUBLISHED.items():
        assert expected(by_name[name], CHIPS[-1], learners) == pytest.approx(goodput, abs=0.01)
