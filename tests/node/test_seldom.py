"""`seldom`: what lasts is said once in five minutes, and that it is over."""

from __future__ import annotations

import logging

import pytest

from gossamer.node.logs import CALM_S, REPEAT_S, Seldom, Trouble


def test_an_event_is_said_again_only_after_minutes() -> None:
    seldom = Seldom()
    assert seldom.is_due("full", 0.0) and not seldom.is_due("full", REPEAT_S - 1)
    assert seldom.is_due("gone", 1.0), "that is another"
    assert seldom.is_due("full", REPEAT_S) and not seldom.is_due("full", REPEAT_S + 1)


def test_events_that_are_long_past_take_no_room() -> None:
    seldom = Seldom()
    for n in range(10_000):
        assert seldom.is_due(n, float(n))
    assert len(seldom._said) == REPEAT_S


def test_trouble_is_over_when_it_stays_away(caplog: pytest.LogCaptureFixture) -> None:
    """A disk may have room for every other file."""
    caplog.set_level(logging.INFO)
    now = 0.0
    trouble = Trouble(logging.getLogger("disk"), "it works again", lambda: now)
    trouble.not_met()
    assert not trouble.lasting
    for _ in range(20):
        trouble.met("the disk is full")
        trouble.not_met()
        now += 5.0
        assert trouble.lasting == "the disk is full"
    assert caplog.messages == ["the disk is full"]
    now += CALM_S
    assert not trouble.lasting
    for _ in range(3):
        trouble.not_met()
    assert caplog.messages == ["the disk is full", "it works again"]
    trouble.met("the disk is full")
    assert caplog.messages[2:] == ["the disk is full"], "at once, as it is new"


def test_trouble_whose_words_vary_is_one_event(caplog: pytest.LogCaptureFixture) -> None:
    trouble = Trouble(logging.getLogger("disk"), "")
    for n in range(9):
        trouble.met(f"cannot read {n}", event="reading")
    assert caplog.messages == ["cannot read 0"]
