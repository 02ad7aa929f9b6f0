"""`gossamer.node.daemon.monitoring.events` and `gossamer.node.daemon.monitoring.status`."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from gossamer.node.daemon.monitoring.events import NOTICES_MAX, TEXT_MAX, Notices
from gossamer.node.daemon.monitoring.status import SAMPLES, Rates
from gossamer.node.daemon.network.links import Traffic

log = logging.getLogger("gossamer.some.part")


def test_the_latest_lines_of_the_log_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    notices = Notices()
    notices.begin()
    try:
        log.debug("not for people")
        log.info("hello %s\x1b[2J", "there")
        log.warning("careful")
        log.error("x" * 2000)
    finally:
        notices.end()
    log.error("after the end")
    kept = notices.since(0)
    assert [(n.level, n.text) for n in kept] == [
        ("info", "hello there\\x1b[2J"),
        ("warning", "careful"),
        ("error", "x" * TEXT_MAX),
    ]
    assert [n.number for n in notices.since(1)] == [2, 3]
    assert kept[1].to_json()["level"] == "warning"


def test_no_more_than_some_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    notices = Notices()
    for number in range(NOTICES_MAX + 10):
        notices.handle(log.makeRecord(log.name, logging.INFO, "", 0, f"line {number}", (), None))
    kept = notices.since(0)
    assert len(kept) == NOTICES_MAX and kept[-1].text == f"line {NOTICES_MAX + 9}"


def test_rates_are_means_over_the_last_seconds() -> None:
    link: Any = SimpleNamespace(number=1, traffic=Traffic())
    rates = Rates()
    assert rates.of(1) == (0.0, 0.0)
    rates.look([link], 0.0)
    assert rates.of(1) == (0.0, 0.0), "one look tells no rate"
    for second in range(20):
        rates.look([link], float(second))
        link.traffic.sent += 100
        link.traffic.payload_received += 50 if second >= 20 - SAMPLES else 5
    assert rates.of(1) == (100.0, 50.0)
    rates.look([], 20.0)
    assert rates.of(1) == (0.0, 0.0)
