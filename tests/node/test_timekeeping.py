"""The core hears of a clock that moved before it hears of anything that came after."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from gossamer.node.daemon import daemon as timekeeping
from gossamer.node.daemon.daemon import CLOCK_MOVED_S, Timekeeper
from gossamer.protocol import events as ev
from gossamer.protocol.replica import Replica


def test_a_clock_that_moved_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    offset_s = 1000.0
    monkeypatch.setattr(timekeeping, "unix_offset_s", lambda: offset_s)
    told: list[ev.Event] = []
    keeper = Timekeeper(cast(Replica, SimpleNamespace()), told.append)
    assert not keeper.check_clock()
    offset_s += CLOCK_MOVED_S / 2
    assert not keeper.check_clock()
    assert told == [], "time servers correct that by and by"
    offset_s += 3600.0
    assert keeper.check_clock()
    assert not keeper.check_clock()
    assert told == [ev.TimeSet(offset_s)]
