"""`gossamer.node.trainer.peer`: Ctrl-C, or whatever a signal raises, comes between two states, each of them
whole."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from gossamer.node.trainer import outer
from gossamer.node.trainer.peer import Peer
from gossamer.protocol.fixedpoint import ONE
from tests.node.begun_peer import EVERY, begun
from tests.node.trainer_side import until

pytestmark = pytest.mark.usefixtures("reconnects_at_once")


@contextlib.contextmanager
def python_hears_ctrl_c() -> Iterator[None]:
    """As in a script or a notebook; the event loop that runs these tests listens itself."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _interrupted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Ctrl-C is pressed when the function has begun."""

    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return function(*arguments)

    return interrupted


async def test_ctrl_c_waits_until_all_progress_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with begun(tmp_path, fragments=2) as setup:
        setup.step()
        loop = setup.peer._role._outer  # type: ignore[attr-defined]
        with python_hears_ctrl_c(), pytest.raises(KeyboardInterrupt):
            monkeypatch.setattr(loop, "reset", _interrupted(loop.reset))
            setup.peer.drop_progress()
        assert np.allclose(setup.weights(), setup.phi / ONE, atol=1e-7)
        await asyncio.to_thread(setup.peer.leave)
        assert setup.daemon.seen == [], "nothing is left to publish"


async def test_ctrl_c_waits_until_phi_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook goes on with the next cell, and with the same peer."""
    async with begun(tmp_path) as setup:
        await until(lambda: setup.daemon.port.is_free(0))
        newer = setup.phi + (1 << 20)
        await setup.daemon.offer(0, newer, merged=1, own=0, version=2)
        await until(lambda: setup.link._offers)
        monkeypatch.setattr(outer, "_take_over", _interrupted(outer._take_over))
        with python_hears_ctrl_c(), pytest.raises(KeyboardInterrupt):
            setup.step()
        assert np.allclose(setup.weights(), newer / ONE + 0.001, atol=1e-6)
        await until(lambda: setup.daemon.port.is_free(0))
        versions: list[int] = []
        setup.peer.on_merged(lambda peer: versions.append(peer.version))
        setup.step()
        assert versions == [2], "callbacks hear of it at the next step"


async def test_ctrl_c_waits_until_an_offer_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with begun(tmp_path) as setup:
        await setup.offer(0, version=2)
        take = setup.link.take_offer

        def interrupted() -> Any:
            offer = take()
            signal.raise_signal(signal.SIGINT)
            return offer

        with python_hears_ctrl_c(), monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(setup.link, "take_offer", interrupted)
            setup.step()
        setup.step()
        assert setup.peer.version == 2
        await until(lambda: setup.daemon.port.is_free(0))


async def test_ctrl_c_waits_until_the_daemon_hears_that_an_offer_is_outdated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with begun(tmp_path) as setup:
        while setup.step() is None:
            pass
        await setup.offer(0, version=2)
        with python_hears_ctrl_c(), monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(setup.link, "took", _interrupted(setup.link.took))
            setup.step()
        await until(lambda: setup.daemon.port.is_free(0))


async def test_ctrl_c_where_nothing_changes_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with begun(tmp_path) as setup:
        setup.step()
        loop = setup.peer._role._outer  # type: ignore[attr-defined]
        with python_hears_ctrl_c(), monkeypatch.context() as patched:
            patched.setattr(loop, "step", _interrupted(loop.step))
            with pytest.raises(KeyboardInterrupt) as caught:
                setup.step()
        await asyncio.to_thread(setup.peer.__exit__, caught.type, caught.value, caught.tb)
        assert setup.daemon.seen == [1] and (tmp_path / "c").exists()


async def test_ctrl_c_waits_until_a_delta_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with begun(tmp_path) as setup:
        publish = setup.link.publish
        monkeypatch.setattr(setup.link, "publish", _interrupted(publish))
        with python_hears_ctrl_c():
            with pytest.raises(KeyboardInterrupt):
                for _ in range(EVERY):
                    setup.step()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        await until(lambda: 1 in setup.daemon.signed)
        assert not setup.peer._role.is_stepping, "so that leaving publishes the next window"


async def test_a_step_that_is_interrupted_anywhere_can_be_called_again(tmp_path: Path) -> None:
    """A signal comes between a call and what follows it."""
    async with begun(tmp_path) as setup:
        done = False
        for moment in range(100):
            left = iter(range(moment))

            def interrupt(frame: FrameType, event: str, argument: object, left: Iterator[int] = left) -> None:
                if frame.f_code is Peer.step.__code__ and next(left, None) is None:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

            sys.setprofile(interrupt)
            try:
                setup.step()
                done = True
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
            setup.step()
            if done:
                return
        raise AssertionError("it was interrupted all the time")


async def test_a_watchdog_that_raises_waits_until_a_delta_is_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bark(*_: object) -> None:
        raise TimeoutError

    async with begun(tmp_path) as setup:
        take = outer.OuterLoop.publish

        def barked(*arguments: Any) -> Any:
            taken = take(*arguments)
            signal.raise_signal(signal.SIGALRM)
            return taken

        monkeypatch.setattr(outer.OuterLoop, "publish", barked)
        handler = signal.signal(signal.SIGALRM, bark)
        try:
            with pytest.raises(TimeoutError):
                for _ in range(EVERY):
                    setup.step()
            assert signal.getsignal(signal.SIGALRM) is bark
        finally:
            signal.signal(signal.SIGALRM, handler)
        await until(lambda: 1 in setup.daemon.signed)
        assert not setup.peer._role.is_stepping
