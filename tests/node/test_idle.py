"""`IdleWatch`: a loop that trains another model, from the beginning or from then on, is told so once."""

from __future__ import annotations

import pytest

from gossamer.node.trainer.watchdogs import TURNS, IdleWatch

FRAGMENTS = 3


def publish(watch: IdleWatch, *changed: bool) -> None:
    for round_, has_changed in enumerate(changed):
        watch.look(round_ % FRAGMENTS, has_changed)


def test_who_never_trains_is_told_after_a_turn(caplog: pytest.LogCaptureFixture) -> None:
    watch = IdleWatch(FRAGMENTS)
    publish(watch, False, False)
    assert not caplog.text
    publish(watch, *[False] * (3 * TURNS * FRAGMENTS))
    assert caplog.text.count("no parameter has changed since training began") == len(caplog.records) == 1


def test_who_trains_no_more_is_told_after_many(caplog: pytest.LogCaptureFixture) -> None:
    """A notebook whose cell that makes the model is run again, and not the one that attaches it."""
    watch = IdleWatch(FRAGMENTS)
    publish(watch, True, *[False] * (TURNS * FRAGMENTS - 1), True, *[False] * (TURNS * FRAGMENTS - 1))
    assert not caplog.text, "it trained in between"
    publish(watch, *[False] * (3 * TURNS * FRAGMENTS))
    said = f"no parameter has changed for {TURNS * FRAGMENTS} rounds, so nothing is published any more"
    assert caplog.text.count(said) == len(caplog.records) == 1
