"""An error in the middle of a step, Ctrl-C among them: the open windows are dropped, and training goes on."""

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
import torch

from gossamer.node.ipc import messages as control
from gossamer.node.trainer import outer
from gossamer.node.trainer.peer import Peer
from gossamer.protocol.fixedpoint import ONE
from tests.node.begun_peer import EVERY, Setup, begun
from tests.node.trainer_side import until

pytestmark = pytest.mark.usefixtures("reconnects_at_once")


@contextlib.contextmanager
def default_ctrl_c() -> Iterator[None]:
    """As in a script or a notebook; the event loop that runs these tests listens itself."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def interrupted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Ctrl-C is pressed when the function has begun."""

    def run(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return function(*arguments)

    return run


async def reconnected(setup: Setup, attachments: int = 1) -> None:
    """Wait until the trainer has asked for Phi again, and offer it, as a daemon does."""
    await until(lambda: setup.daemon.port.attachments > attachments and setup.link.is_attached)
    for fragment in setup.daemon.manifest.plan().fragments:
        await setup.offer(fragment.index, version=2)


async def goes_on(setup: Setup, round_: int = 1) -> None:
    """Assert that the model is the swarm's again, and that the next window is published."""
    setup.peer.step(tokens=10, loss=2.0)
    assert np.allclose(setup.weights(), setup.phi / ONE, atol=1e-7)
    await until(lambda: setup.link.can_publish)
    assert [setup.step() for _ in range(2 * EVERY)].count(round_) == 1
    await until(lambda: round_ in setup.daemon.signed)


async def test_a_model_that_diverged_goes_on_from_the_swarms(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With a fresh inner optimizer, whose momentum would spoil it again."""
    async with begun(tmp_path) as setup:
        for parameter in setup.model.parameters():
            parameter.grad = torch.full_like(parameter, torch.nan)
        setup.optimizer.step()
        assert [setup.step() for _ in range(EVERY)] == [None] * EVERY
        assert "tensor 'weight' is not finite" in caplog.text and len(caplog.records) == 1
        assert "learnt since its last delta is dropped; it goes on from the swarm's model" in caplog.text
        await reconnected(setup)
        assert setup.optimizer.state
        await goes_on(setup)
        assert not setup.optimizer.state and setup.daemon.seen == [1]


@pytest.mark.parametrize("failing", ["_take_over", "PayloadWriter"])
async def test_an_error_in_a_change_drops_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    async with begun(tmp_path) as setup:
        setup.step()
        with monkeypatch.context() as patched:
            patched.setattr(outer, failing, fails)
            await setup.offer(0, version=2)
            for _ in range(EVERY):
                setup.step()
        assert "RuntimeError: out of memory. What this node has learnt since" in caplog.text
        assert setup.optimizer.state == {}
        await reconnected(setup)
        await goes_on(setup)


async def test_a_node_that_leaves_before_it_has_the_swarms_model_again_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with begun(tmp_path) as setup:
        setup.step()
        with default_ctrl_c(), monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(outer.OuterLoop, "step", interrupted(outer.OuterLoop.step))
            setup.step()
        await asyncio.to_thread(setup.peer.leave)
        assert setup.daemon.seen == []


async def test_a_delta_that_ctrl_c_came_before_is_handed_over_when_the_daemon_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is whole, and counts as ours from then on."""
    async with begun(tmp_path) as setup:
        with default_ctrl_c(), monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(setup.link, "send", interrupted(setup.link.send))
            for _ in range(EVERY):
                setup.step()
        await until(lambda: 1 in setup.daemon.signed)
        setup.daemon.port.send(control.Clock(1, 0))
        await reconnected(setup)
        await goes_on(setup, round_=2)


async def test_a_step_that_is_interrupted_anywhere_can_be_called_again(tmp_path: Path) -> None:
    """A signal comes between a call and what follows it."""
    async with begun(tmp_path) as setup:
        done, attachments = False, 1
        for moment in range(200):
            left = iter(range(moment))

            def interrupt(frame: FrameType, event: str, argument: object, left: Iterator[int] = left) -> None:
                is_ours = "gossamer" in frame.f_code.co_filename and event == "call"
                if is_ours and frame.f_code is not Peer.step.__code__ and next(left, None) is None:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

            await until(lambda: setup.link.can_publish)
            for _ in range(EVERY - 1):
                setup.step()
            sys.setprofile(interrupt)
            try:
                setup.step()
                done = True
            except KeyboardInterrupt:
                pass
            finally:
                sys.setprofile(None)
            if setup.peer._role._missing:  # type: ignore[attr-defined]
                await reconnected(setup, attachments)
                attachments = setup.daemon.port.attachments
                setup.peer.step(tokens=10, loss=2.0)
            assert np.isfinite(setup.weights()).all()
            setup.daemon.port.send(control.Clock(setup.peer.round, 0))
            await until(lambda: setup.peer.clock == setup.peer.round)
            if done:
                assert setup.peer.round in setup.daemon.signed or not setup.link.can_publish
                return
        raise AssertionError("it was interrupted all the time")
