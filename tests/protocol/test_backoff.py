"""Waits that get longer, and are forgotten in the end."""

from __future__ import annotations

from gossamer.protocol.backoff import Backoff


def test_each_wait_is_twice_as_long_as_the_one_before_up_to_the_longest() -> None:
    rest, now, waits = None, 100.0, []
    for _ in range(5):
        rest = Backoff.after(rest, now, 1.0, 6.0)
        waits.append(rest.until - now)
        now = rest.until
    assert waits == [1.0, 2.0, 4.0, 6.0, 6.0]


def test_a_wait_is_forgotten_once_as_long_again_has_passed_or_it_has_been_kept() -> None:
    for kept, remembered in ((0.0, 1.0), (9.0, 9.0)):
        rest = Backoff.after(None, 0.0, 1.0, 60.0, kept)
        assert Backoff.after(rest, 0.9 + remembered, 1.0, 60.0).wait == 2.0
        assert Backoff.after(rest, 1.0 + remembered, 1.0, 60.0).wait == 1.0
