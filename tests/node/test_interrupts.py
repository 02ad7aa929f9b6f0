"""`gossamer.node.trainer.watchdogs`: signals wait for what is under way."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from gossamer.node.trainer.watchdogs import held_back

NUMBERS = (signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)


class Raised(Exception):
    pass


@pytest.fixture
def heard() -> Iterator[list[int]]:
    """Signals whose handler has been called; it raises at SIGALRM and SIGUSR2."""
    heard: list[int] = []

    def hear(number: int, _: object) -> None:
        heard.append(number)
        if number != signal.SIGUSR1:
            raise Raised(number)

    before = {number: signal.signal(number, hear) for number in NUMBERS}
    yield heard
    for number, handler in before.items():
        signal.signal(number, handler)


def test_all_are_heard_in_the_order_in_which_they_came(heard: list[int]) -> None:
    handlers = [signal.getsignal(number) for number in NUMBERS]
    with pytest.raises(Raised) as raised, held_back():
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGUSR2):
            signal.raise_signal(number)
        assert heard == []
    assert heard == [signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM]
    assert raised.value.args == (signal.SIGALRM,)
    assert [signal.getsignal(number) for number in NUMBERS] == handlers


def test_what_is_within_another_waits_for_that(heard: list[int]) -> None:
    with held_back():
        with held_back():
            signal.raise_signal(signal.SIGUSR1)
        assert heard == []
    assert heard == [signal.SIGUSR1]


def test_an_error_inside_gives_them_back_too(heard: list[int]) -> None:
    handler = signal.getsignal(signal.SIGALRM)
    with pytest.raises(ValueError, match="inside"), held_back():
        signal.raise_signal(signal.SIGUSR1)
        raise ValueError("inside")
    assert heard == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGALRM) is handler


def test_all_are_given_back_though_the_first_raises_at_once(
    heard: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = {number: signal.getsignal(number) for number in NUMBERS}
    put = signal.signal

    def put_and_hear(number: int, handler: signal._HANDLER) -> signal._HANDLER:
        before = put(number, handler)
        if handler is handlers.get(number) and number == signal.SIGALRM and not heard:  # type: ignore[call-overload]
            signal.raise_signal(number)
        return before

    with pytest.raises(Raised), held_back():
        monkeypatch.setattr(signal, "signal", put_and_hear)
    monkeypatch.undo()
    assert {number: signal.getsignal(number) for number in NUMBERS} == handlers


def test_other_threads_hold_nothing_back(heard: list[int]) -> None:
    handler = signal.getsignal(signal.SIGUSR1)
    found: list[object] = []

    def look() -> None:
        with held_back():
            found.append(signal.getsignal(signal.SIGUSR1))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [handler]


def test_a_process_that_another_thread_forks_meanwhile_hears_its_signals(heard: list[int]) -> None:
    ended: list[int] = []

    def fork() -> None:
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGUSR1)
            finally:
                os._exit(len(heard))
        ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    thread = threading.Thread(target=fork)
    with held_back():
        thread.start()
        thread.join()
        signal.raise_signal(signal.SIGUSR1)
        assert heard == []
    assert ended == [1]
    assert heard == [signal.SIGUSR1]


def test_handlers_of_signals_that_end_no_step_are_not_touched() -> None:
    """What is set below them would not come back: that no call of the system is interrupted, say."""
    before = signal.signal(signal.SIGWINCH, lambda *_: None)
    try:
        handler = signal.getsignal(signal.SIGWINCH)
        with held_back():
            assert signal.getsignal(signal.SIGWINCH) is handler
    finally:
        signal.signal(signal.SIGWINCH, before)
