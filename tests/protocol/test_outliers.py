"""What is usual in a fragment's last rounds, and what is far more."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from gossamer.protocol.merge.merge import OUTLIER_TIMES, USUAL_ROUNDS, UsualRates
from tests.protocol import builders

OWN, OTHER, THIRD = (bytes([number]) * 32 for number in range(3))
FRAGMENT = builders.several_tensors([10, 10])


def moved(author: bytes, *norms: float, steps: int = 4) -> Any:
    return SimpleNamespace(author=author, norms=norms, steps=steps)


def test_of_a_delta_that_was_alone_only_our_own_shows_what_is_usual() -> None:
    """Whoever had a round to itself could make anything usual."""
    usual = UsualRates(OWN)
    for contributions in ([], [moved(OTHER, 1.0, 1.0)]):
        usual.note(1, FRAGMENT, contributions)
        assert not usual.are_known(FRAGMENT)
    usual.note(2, FRAGMENT, [moved(OWN, 1.0, 1.0)])
    assert usual.are_known(FRAGMENT)
    usual.note(3, FRAGMENT, [moved(OTHER, 100.0, 100.0)])
    assert usual.are_all_exceeded(FRAGMENT, [moved(THIRD, 100.0, 100.0)])


def test_what_is_far_more_than_usual_in_one_tensor_is_an_outlier_for_its_steps() -> None:
    usual = UsualRates(OWN)
    usual.note(1, FRAGMENT, [moved(OWN, 1.0, 2.0), moved(OTHER, 1.0, 2.0)])
    within, beyond = 0.9 * OUTLIER_TIMES, 1.1 * OUTLIER_TIMES
    assert not usual.are_all_exceeded(FRAGMENT, [moved(THIRD, within, 2 * within)])
    assert usual.are_all_exceeded(FRAGMENT, [moved(THIRD, 1.0, 2 * beyond)])
    assert not usual.are_all_exceeded(FRAGMENT, [moved(THIRD, 1.0, 2 * beyond, steps=16)]), "twice as far"
    assert not usual.are_all_exceeded(FRAGMENT, [moved(THIRD, 1.0, 2 * beyond), moved(OTHER, 1.0, 2.0)])


def test_only_the_last_rounds_show_what_is_usual() -> None:
    usual, far = UsualRates(OWN), [moved(THIRD, 2 * OUTLIER_TIMES, 1.0)]
    usual.note(1, FRAGMENT, [moved(OWN, 10.0, 1.0)])
    for round_ in range(2, 1 + USUAL_ROUNDS):
        usual.note(round_, FRAGMENT, [moved(OWN, 1.0, 1.0)])
        assert not usual.are_all_exceeded(FRAGMENT, far), "the first is among them"
    usual.note(1 + USUAL_ROUNDS, FRAGMENT, [moved(OWN, 1.0, 1.0)])
    assert usual.are_all_exceeded(FRAGMENT, far)


def test_of_a_tensor_that_has_not_moved_yet_nothing_is_unusual() -> None:
    usual = UsualRates(OWN)
    usual.note(1, FRAGMENT, [moved(OWN, 1.0, 0.0)])
    assert not usual.are_all_exceeded(FRAGMENT, [moved(THIRD, 1.0, 1e9)])
