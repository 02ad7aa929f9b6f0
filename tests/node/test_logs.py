"""`gossamer.node.logs`: one line an event, whatever a peer puts into it."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gossamer.node import logs
from gossamer.node.logs import CALM_S, REPEAT_S, Fault, RateLimit

NASTY = "line\nnext \x1b[31mred\x1b[0m \r back\x08 \x00 \u202egnp.exe \x9b0m"


@contextlib.contextmanager
def configured(into: io.StringIO | None = None, **settings: Any) -> Iterator[io.StringIO]:
    """What is logged to standard error; pytest's own handlers come back afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    with contextlib.redirect_stderr(into or io.StringIO()) as stream:
        root.handlers = []  # `configure` closes those that it finds
        try:
            logs.configure(**settings)
            yield stream
            root.handlers[0].flush()
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)


@pytest.mark.parametrize(
    ("set_to", "level"),
    [(logging.NOTSET, "info"), (5, "debug"), (logging.WARNING, "warning"), (logging.CRITICAL, "error")],
)
def test_the_level_of_a_logger_in_our_words(set_to: int, level: str) -> None:
    logger = logging.Logger("some")
    logger.setLevel(set_to)
    assert logs.level_of(logger) == level


def test_control_characters_are_made_visible() -> None:
    """Of an exception, the traceback stays as many lines as it was, and what it says one of them."""
    with configured() as stream:
        logging.getLogger("gossamer.x").warning("%s said: %s", "peer", NASTY)
        try:
            raise ValueError(NASTY)
        except ValueError:
            logging.getLogger("gossamer.x").exception("a fault")
    first, *others = stream.getvalue().splitlines()
    assert first.isprintable() and first[20:].startswith("warning "), "after the date and the time"
    assert r"line\nnext \x1b[31mred" in first
    assert all(map(str.isprintable, others)) and r"\x1b[31mred" in others[-1] and len(others) >= 4


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "date"), [(io.StringIO, r"\d{4}-\d\d-\d\d "), (Terminal, "")])
def test_lines_are_dated_unless_somebody_sees_them_come(stream: type[io.StringIO], date: str) -> None:
    with configured(stream()) as written:
        logging.getLogger("gossamer.x").info("text")
    assert re.fullmatch(date + r"\d\d:\d\d:\d\d info    text\n", written.getvalue())


def test_what_aiohttp_warns_of_costs_no_line() -> None:
    """Such as each request for a WebSocket of a subprotocol that we do not have: anybody can make those."""
    with configured(debug=True) as stream:
        logging.getLogger("aiohttp.websocket").warning("Client protocols %r", "x" * 8000)
    assert stream.getvalue() == ""


def test_json_is_one_object_a_line() -> None:
    with configured(as_json=True) as stream:
        logging.getLogger("gossamer.x").error("%s", NASTY)
        try:
            raise ValueError(NASTY)
        except ValueError:
            logging.getLogger("gossamer.y").exception("failed")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    first, second = map(json.loads, lines)
    assert (first["level"], first["logger"], first["text"]) == ("error", "gossamer.x", NASTY)
    assert abs(first["t"] - logging.LogRecord("", 0, "", 0, "", (), None).created) < 60
    assert "ValueError" in second["traceback"]


@pytest.mark.parametrize(("level", "lines"), [("debug", 4), ("info", 3), ("warning", 2), ("error", 1)])
def test_a_level_is_shown_from_there_on(level: str, lines: int) -> None:
    with configured(level=level) as stream:
        log = logging.getLogger("gossamer.x")
        for said in (log.debug, log.info, log.warning, log.error):
            said("text")
        assert log.isEnabledFor(logging.INFO), "whoever keeps notices hears of it all the same"
    assert stream.getvalue().count("\n") == lines


def test_nobody_waits_for_a_terminal_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-S, or a pipe that is not read: more lines than are kept, and none is waited for."""
    goes_on = threading.Event()

    class Stuck(io.StringIO):
        def write(self, text: str) -> int:
            goes_on.wait(60)
            return super().write(text)

    monkeypatch.setattr(logs, "LINES_MAX", 10)
    with configured(into=Stuck()) as stream:
        for number in range(100):
            logging.getLogger("gossamer.x").warning("line %d", number)
        assert stream.getvalue() == ""
        goes_on.set()
    lines = stream.getvalue().splitlines()
    assert 10 <= len(lines) <= 11, "one was being written"
    assert lines[0].endswith("line 0")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_logs_too() -> None:
    with configured() as stream:
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:
            logging.getLogger("gossamer.x").warning("from the child")
            os.write(write_end, stream.getvalue().encode())
            os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end) as told:
            assert told.read().endswith("from the child\n")
        os.waitpid(child, 0)


def test_a_line_that_cannot_be_formatted_does_no_harm() -> None:
    with configured() as stream:
        logging.getLogger("gossamer.x").warning("%d", "no number")
        logging.getLogger("gossamer.x").warning("next")
    assert "next" in stream.getvalue()


def test_an_event_is_logged_again_only_after_minutes() -> None:
    now = 0.0
    limit = RateLimit(lambda: now)
    assert limit.allows("full") and limit.allows("gone"), "that is another"
    now = REPEAT_S - 1
    assert not limit.allows("full")
    now = REPEAT_S
    assert limit.allows("full") and not limit.allows("full")


def test_events_that_are_long_past_take_no_room() -> None:
    now = 0
    limit = RateLimit(lambda: now)
    for now in range(10_000):
        assert limit.allows(now)
    assert len(limit._logged) == REPEAT_S


def test_a_fault_is_over_when_it_stays_away(caplog: pytest.LogCaptureFixture) -> None:
    """A disk may have room for every other file."""
    caplog.set_level(logging.INFO)
    now = 0.0
    fault = Fault(logging.getLogger("disk"), "it works again", lambda: now)
    fault.worked()
    assert not fault.text
    for _ in range(20):
        fault.failed("the disk is full")
        fault.worked()
        now += 5.0
        assert fault.text == "the disk is full"
    assert caplog.messages == ["the disk is full"]
    now += CALM_S
    assert not fault.text
    for _ in range(3):
        fault.worked()
    assert caplog.messages == ["the disk is full", "it works again"]
    fault.failed("the disk is full")
    assert caplog.messages[2:] == ["the disk is full"], "at once, as it is new"


def test_a_fault_whose_words_vary_is_one_event(caplog: pytest.LogCaptureFixture) -> None:
    fault = Fault(logging.getLogger("disk"), "")
    for n in range(9):
        fault.failed(f"cannot read {n}", event="reading")
    assert caplog.messages == ["cannot read 0"]
