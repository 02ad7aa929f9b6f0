"""`gossamer.node.trainer.peer`: at the end it publishes and saves what is whole, once, whatever ended it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from gossamer.node.ipc import messages as control
from gossamer.node.trainer import outer as leader
from gossamer.node.trainer import peer as peer_module
from gossamer.protocol.fixedpoint import ONE
from tests.node.begun_peer import EVERY, Setup, begun, saved_in
from tests.node.trainer_side import until

pytestmark = pytest.mark.usefixtures("reconnects_at_once")


async def test_after_the_last_round_it_publishes_no_more(tmp_path: Path) -> None:
    async with begun(tmp_path, stop_round=1) as setup:
        while setup.step() is None:
            assert not setup.peer.finished
        assert setup.peer.finished
        setup.daemon.port.send(control.Clock(5, 0))
        await until(lambda: setup.peer.clock == 5)
        await until(lambda: setup.link.can_publish)
        for _ in range(3 * EVERY):
            assert setup.step() is None
        await asyncio.to_thread(setup.peer._role.flush, 60)
        assert list(setup.daemon.signed) == [1]

        setup.peer.drop_progress()
        await until(lambda: setup.daemon.port.is_free(0))
        newer = setup.phi + 4096
        await setup.daemon.offer(0, newer, merged=5, own=1, version=9)
        await until(lambda: setup.link._offers)
        assert setup.peer.settle()
        assert not setup.peer.settle()
        assert np.allclose(setup.weights(), newer / ONE, atol=1e-7)


async def test_who_leaves_as_it_has_published_publishes_the_next_fragment_too(tmp_path: Path) -> None:
    """Which has learnt for three quarters of a window, where there are four."""
    async with begun(tmp_path, fragments=2) as setup:
        while setup.step() is None:
            pass
        assert await asyncio.to_thread(setup.link.wait_acknowledged, 60)
        setup.daemon.port.send(control.Clock(1, 0))
        await until(lambda: setup.peer.clock == 1)
        await asyncio.to_thread(setup.peer._role.flush, 60)
        assert list(setup.daemon.signed) == [1, 2]
        await asyncio.to_thread(setup.peer._role.flush, 60)
        assert list(setup.daemon.signed) == [1, 2], "of the one that was published first nothing is new"


async def test_who_has_time_to_leave_publishes_all_fragments_as_the_swarm_comes_to_their_rounds(
    tmp_path: Path,
) -> None:
    async with begun(tmp_path, fragments=2, extra_stop_s=600.0) as setup:
        setup.step()
        leaving = asyncio.create_task(asyncio.to_thread(setup.peer.leave))
        await until(lambda: setup.daemon.signed)
        assert list(setup.daemon.signed) == [1] and not leaving.done()
        setup.daemon.port.send(control.Clock(1, 0))
        await leaving
        assert list(setup.daemon.signed) == [1, 2], "and then nothing is left to wait for"


async def test_a_loop_without_step_is_logged_at_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with begun(tmp_path) as setup:
        await asyncio.to_thread(setup.peer._role.flush, 60)
        assert not caplog.text, "nothing was trained"
        with torch.no_grad():
            setup.model.weight.add_(0.001)
        await asyncio.to_thread(setup.peer._role.flush, 60)
        assert "step was never called), so what has changed since is not published" in caplog.text


def step_and_diverge(setup: Setup) -> None:
    with torch.no_grad():
        setup.model.weight[0, 0] = float("nan")
    setup.peer.step(tokens=10, loss=2.0)


async def test_a_model_that_diverged_at_the_end_finishes_with_the_swarms(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with begun(tmp_path) as setup:
        step_and_diverge(setup)
        finishing = asyncio.create_task(asyncio.to_thread(setup.peer.finish, quiet_s=0.05, timeout_s=60))
        await until(lambda: setup.daemon.port.attachments == 2 and setup.link.is_attached)
        await setup.daemon.offer(0, setup.phi, merged=0, own=0, version=2)
        assert await finishing
        assert np.allclose(setup.weights(), setup.phi / ONE, atol=1e-7) and not setup.daemon.signed
        assert "What this node has learnt since its last delta is dropped" in caplog.text


async def test_averages_of_an_optimizer_do_not_replace_the_swarms_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ScheduleFree's, which trainers and scripts put into eval mode once more after training."""
    async with begun(tmp_path) as setup:
        trains = True

        def evaluate() -> None:
            nonlocal trains
            if trains:
                setup.model.weight.data.fill_(7)
            trains = False

        monkeypatch.setattr(setup.optimizer, "eval", evaluate, raising=False)
        assert await asyncio.to_thread(lambda: setup.peer.finish(quiet_s=0.05, timeout_s=60))
        evaluate()
        assert np.allclose(setup.weights(), setup.phi / ONE, atol=1e-7)


async def test_a_script_that_ended_with_a_model_that_diverged_ends_with_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with begun(tmp_path) as setup:
        step_and_diverge(setup)
        await asyncio.to_thread(setup.peer.leave_at_exit)
        assert "'weight' is not finite" in caplog.text


async def test_leaving_publishes_the_open_window_once_the_last_delta_is_acknowledged(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        setup.daemon.acknowledges = False
        while setup.step() is None:
            pass
        setup.step()
        await until(lambda: setup.daemon.signed)
        leaving = asyncio.create_task(asyncio.to_thread(setup.peer._role.flush, 60))
        await asyncio.sleep(0)
        setup.daemon.acknowledges = True
        setup.daemon.port.send(control.Clock(1, 0))
        setup.daemon.port.send(control.Published(1))
        await leaving
        assert list(setup.daemon.signed) == [1, 2]


@pytest.mark.parametrize("returns", [True, False])
async def test_who_finishes_without_a_daemon_waits_for_it_and_no_longer_than_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, returns: bool
) -> None:
    """Or what the open window holds would be dropped, with seconds to spare."""
    async with begun(tmp_path) as setup:
        setup.step()
        await setup.daemon.die()
        await until(lambda: not setup.link.is_attached)
        timeout_s = 60 if returns else 0.3
        finishing = asyncio.create_task(
            asyncio.to_thread(setup.peer.finish, quiet_s=0.05, timeout_s=timeout_s)
        )
        await asyncio.sleep(0.1)
        if returns:
            setup.daemon.start()
        assert await finishing == returns
        assert list(setup.daemon.signed) == [1] * returns
        assert ("is not published: its daemon does not answer" in caplog.text) == (not returns)
        if not returns:
            setup.daemon.start()


@pytest.mark.parametrize(("dies", "why"), [(True, "does not answer"), (False, "has yet to store that one")])
async def test_what_no_daemon_can_take_at_the_end_is_not_lost_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dies: bool, why: str
) -> None:
    async with begun(tmp_path) as setup:
        setup.daemon.answers = False
        while setup.step() is None:
            pass
        if dies:
            await setup.daemon.die()
            await until(lambda: not setup.link.is_attached)
        await asyncio.to_thread(setup.peer._role.flush, 0.05)
        assert "has yet to store the delta of round 1, which is lost" in caplog.text
        assert "is not published" not in caplog.text, "the window is empty"
        setup.step()
        await asyncio.to_thread(setup.peer._role.flush, 0.05)
        assert f"learnt since its last delta is not published: its daemon {why}" in caplog.text
        if dies:
            setup.daemon.start()


def _nothing(_: Setup) -> None:
    pass


def _optimizers_step(setup: Setup) -> None:
    for parameter in setup.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    setup.optimizer.step()


def _averages_in_an_evaluation(setup: Setup) -> None:
    """As Lightning's EMAWeightAveraging swaps them."""
    for parameter in setup.model.parameters():
        parameter.data.copy_(torch.zeros_like(parameter))


def _another_model_loaded(setup: Setup) -> None:
    """For a comparison, say."""
    setup.model.load_state_dict({name: values + 1 for name, values in setup.model.state_dict().items()})


def _half_an_optimizers_step(setup: Setup) -> None:
    """Ctrl-C has come between two parameters."""
    with torch.no_grad():
        next(iter(setup.model.parameters())).add_(1.0)


def _averages_that_were_swapped_back(setup: Setup) -> None:
    own = [parameter.data.clone() for parameter in setup.model.parameters()]
    _averages_in_an_evaluation(setup)
    for parameter, values in zip(setup.model.parameters(), own, strict=True):
        parameter.data.copy_(values)


def _an_evaluation(setup: Setup) -> None:
    setup.model.eval()
    with torch.no_grad():
        setup.model(torch.ones(2, 30))


STATES = [
    (_nothing, True),
    (_an_evaluation, True),
    (_averages_that_were_swapped_back, True),
    (_another_model_loaded, False),
    (_half_an_optimizers_step, False),
    (_optimizers_step, False),
    (_averages_in_an_evaluation, False),
]
"""What a loop may be at after a step, and whether the parameters are as at that step."""


@pytest.mark.parametrize(("then", "is_whole"), STATES)
async def test_a_stop_publishes_the_open_window_at_once_or_after_the_next_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, then: Callable[[Setup], None], is_whole: bool
) -> None:
    caplog.set_level(logging.INFO)
    async with begun(tmp_path) as setup:
        for _ in range(2):
            _optimizers_step(setup)
            setup.step()
        then(setup)
        setup.peer.request_stop()
        assert setup.peer.round == int(is_whole)
        assert ("once its next step is done" in caplog.text) == (not is_whole)
        _optimizers_step(setup)
        setup.step()
        assert setup.peer.round == 1


ENDS = [
    None,
    RuntimeError("a worker was killed"),
    KeyboardInterrupt(),
    SystemExit(),
    asyncio.CancelledError(),
]


@pytest.mark.parametrize("error", ENDS)
@pytest.mark.parametrize(("then", "is_published"), STATES)
async def test_however_a_loop_ends_only_what_is_as_at_the_last_step_is_published(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    then: Callable[[Setup], None],
    is_published: bool,
    error: BaseException | None,
) -> None:
    monkeypatch.setattr(leader.CheckpointWriter, "step", lambda *_: None)
    async with begun(tmp_path) as setup:
        for _ in range(2):
            _optimizers_step(setup)
            setup.step()
        then(setup)
        kind = None if error is None else type(error)
        await asyncio.to_thread(setup.peer.__exit__, kind, error, None)
        assert setup.daemon.seen == [1] * is_published
        assert ("are not as peer.step last left them" in caplog.text) == (not is_published)
        await asyncio.to_thread(setup.peer.leave_at_exit)
        assert setup.daemon.seen == [1] * is_published, "only the first counts"
    assert (tmp_path / "c").exists() == is_published
    if is_published:
        assert saved_in(tmp_path / "c") == (2, True)


async def test_who_was_interrupted_as_it_left_may_leave_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with begun(tmp_path) as setup:
        ends: list[str] = []
        monkeypatch.setattr(setup.peer._role, "flush", lambda _: ends.append("flush"))
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(setup.peer._role, "close", Mock(side_effect=KeyboardInterrupt))
            setup.peer.leave()
        monkeypatch.setattr(setup.peer._role, "close", lambda: ends.append("close"))
        for _ in range(2):
            setup.peer.leave()
        assert ends == ["flush", "close"]


async def test_who_has_left_trains_no_more_and_a_forked_process_ends_nothing(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        setup.peer._pid += 1
        setup.peer.leave()
        setup.peer.close()
        setup.peer._pid -= 1
        assert [setup.step() for _ in range(EVERY)][-1] == 1
        await until(lambda: setup.daemon.seen == [1])  # the connection is its parent's, and still there
        await asyncio.to_thread(setup.peer.abandon)
        for use in (setup.step, setup.peer.finish):
            with pytest.raises(RuntimeError, match="has left its swarm: attach again"):
                use()
        assert setup.peer.metrics()["steps"] == EVERY


async def test_nothing_is_at_rest_while_our_last_delta_is_in_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's disk is full, or slow: the swarm's own model is the one with that delta in it."""
    monkeypatch.setattr(peer_module, "LEAVE_S", 0.05)
    async with begun(tmp_path) as setup:
        setup.daemon.answers = False
        setup.step()
        assert not await asyncio.to_thread(setup.peer.finish, quiet_s=0.02, timeout_s=0.2)
        await until(lambda: setup.daemon.seen == [1])
        assert not setup.daemon.signed and setup.peer.settle()
        setup.daemon.port.send(control.Published(1))
        await until(lambda: setup.link.can_publish)
        assert not setup.peer.settle()
        assert await asyncio.to_thread(setup.peer.finish, quiet_s=0.02, timeout_s=60)


async def test_finishing_without_a_pause_waits_for_what_is_unmerged_all_the_same(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        setup.daemon.port.send(control.Clock(0, 0, unmerged=3))
        await until(lambda: setup.link.unmerged == 3)
        assert not await asyncio.to_thread(setup.peer.finish, quiet_s=0.0, timeout_s=0.05)
        setup.daemon.port.send(control.Clock(0, 0, unmerged=0))
        await until(lambda: setup.link.unmerged == 0)
        assert await asyncio.to_thread(setup.peer.finish, quiet_s=0.0, timeout_s=60)
