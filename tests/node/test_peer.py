"""`gossamer.node.peer`: it publishes when the pace says so, applies what comes, and never waits."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

from gossamer.models.task import named_tensors
from gossamer.node import peer as peer_module
from gossamer.node.ipc import control, daemon_link
from gossamer.node.ipc.daemon_link import DaemonLink
from gossamer.node.peer import Peer
from gossamer.node.training import checkpointwriter, leader, outer
from gossamer.node.training.outer import Ints
from gossamer.protocol.errors import ConfigError, DivergedError
from gossamer.protocol.fixedpoint import ONE
from gossamer.protocol.layout import TensorSpec
from gossamer.protocol.manifest import Manifest
from tests.node.leading import leading
from tests.node.trainer_side import FakeDaemon, daemon_at, link_to, until
from tests.protocol.builders import manifest as build_manifest

EVERY = 4


@pytest.fixture(autouse=True)
def _quickly_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_link, "RECONNECT_S", 0.02)


def metadata_of(checkpoint: Path) -> dict[str, str]:
    with safe_open(checkpoint, framework="pt") as file:
        return dict(file.metadata())


def manifest_for(model: nn.Module, fragments: int = 1) -> Manifest:
    specs = tuple(TensorSpec(n, tuple(p.shape), "mean") for n, p in named_tensors(model))
    pace = {"every_steps": EVERY, "min_round_seconds": 1e-6}
    return build_manifest(specs, fragments, pace=pace)


class Setup:
    """A peer that has begun, its model and its daemon."""

    def __init__(
        self,
        daemon: FakeDaemon,
        link: DaemonLink,
        peer: Peer,
        model: nn.Linear,
        optimizer: torch.optim.Optimizer,
        phi: Ints,
    ) -> None:
        self.daemon = daemon
        self.link = link
        self.peer = peer
        self.model = model
        self.optimizer = optimizer
        self.phi = phi

    def step(self, loss: float | torch.Tensor = 2.0) -> int | None:
        """One inner step: every weight moves by a thousandth."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.001)
        return self.peer.step(tokens=10, loss=loss)

    async def offer(self, index: int, version: int) -> None:
        """Have the daemon offer a fragment that nobody has changed."""
        fragment = self.daemon.manifest.plan().fragments[index]
        await until(lambda: self.daemon.port.is_free(index))
        part = self.phi[fragment.offset : fragment.offset + fragment.numel]
        await self.daemon.offer(index, part, merged=0, own=0, version=version)
        await until(lambda: index in self.link._offers)

    def weights(self) -> np.ndarray:
        parts = [p.detach().double().reshape(-1) for _, p in named_tensors(self.model)]
        return torch.cat(parts).numpy()


@contextlib.asynccontextmanager
async def begun(
    folder: Path, stop_round: int = 0, checkpoint: str = "c", fragments: int = 1
) -> AsyncIterator[Setup]:
    model = nn.Linear(30, 20)
    manifest = manifest_for(model, fragments)
    optimizer = torch.optim.AdamW(model.parameters())
    async with daemon_at(folder, manifest) as daemon, link_to(daemon) as link:
        peer = leading(model, [optimizer], manifest, link, folder / checkpoint, stop_round)
        phi = np.arange(manifest.plan().numel, dtype=np.int32) << 12
        for fragment in manifest.plan().fragments:
            part = phi[fragment.offset : fragment.offset + fragment.numel]
            await daemon.offer(fragment.index, part, merged=0, own=0, version=1)
        assert await asyncio.to_thread(peer.begin)
        try:
            yield Setup(daemon, link, peer, model, optimizer, phi)
        finally:
            await asyncio.to_thread(peer.close)


async def test_it_begins_with_the_swarms_model(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        assert np.allclose(setup.weights(), setup.phi / ONE, atol=1e-7)
        assert setup.peer.version == 1
        await until(lambda: setup.daemon.port.is_free(0))


async def test_a_model_may_hand_its_parameters_out_as_it_likes(tmp_path: Path) -> None:
    class Listed(nn.Linear):
        def parameters(self, recurse: bool = True) -> Any:
            return list(super().parameters(recurse))

    model = Listed(3, 2)
    manifest = manifest_for(model)
    async with daemon_at(tmp_path, manifest) as daemon, link_to(daemon) as link:
        peer = leading(model, [torch.optim.SGD(model.parameters())], manifest, link, tmp_path / "c")
        assert not peer.should_stop
        await asyncio.to_thread(peer.close)


async def test_it_stops_instead_of_beginning_when_the_node_stops(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    manifest = manifest_for(model)
    async with daemon_at(tmp_path, manifest) as daemon, link_to(daemon) as link:
        peer = leading(model, [torch.optim.SGD(model.parameters())], manifest, link, tmp_path / "c")
        waited: list[int] = []
        waiting = asyncio.create_task(asyncio.to_thread(peer.begin, lambda: waited.append(1)))
        await until(lambda: waited)
        daemon.port.send(control.Stop())
        assert await waiting is False
        assert peer.should_stop


async def test_it_publishes_windows_as_the_pace_says(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        rounds = [setup.step() for _ in range(EVERY)]
        assert rounds == [None] * (EVERY - 1) + [1]
        assert setup.peer.round == 1
        await until(lambda: setup.daemon.signed)
        await until(lambda: setup.link.can_publish)
        for _ in range(3 * EVERY):
            assert setup.step() is None, "nobody runs ahead of the clock by more than one"
        setup.daemon.port.send(control.Clock(1, 0))
        await until(lambda: setup.peer.clock == 1)
        assert setup.step() == 2
        await until(lambda: len(setup.daemon.signed) == 2)


async def test_a_window_of_more_steps_than_a_record_can_say_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with begun(tmp_path) as setup:
        published: list[control.Publish] = []
        monkeypatch.setattr(setup.link, "publish", lambda message, area: published.append(message))
        monkeypatch.setattr(leader, "STEPS_MAX", EVERY - 1)
        for _ in range(EVERY):
            setup.step()
        assert [message.steps for message in published] == [EVERY - 1]


@pytest.mark.parametrize("trains", [False, True])
async def test_a_loop_that_trains_something_else_is_told_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trains: bool
) -> None:
    async with begun(tmp_path) as setup:
        for round_ in (1, 2):
            await until(lambda: setup.link.can_publish)
            for _ in range(EVERY):
                if trains:
                    setup.step()
                else:
                    setup.peer.step(tokens=10, loss=2.0)
            assert setup.peer.round == round_
            setup.daemon.port.send(control.Clock(round_, 0))
            await until(lambda now=round_: setup.peer.clock == now)
        assert caplog.text.count("no parameter has changed since training began") == (not trains)


async def test_it_follows_a_clock_that_is_ahead(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        setup.daemon.port.send(control.Clock(7, 0))
        await until(lambda: setup.peer.clock == 7)
        assert setup.step() == 7, "a slow node publishes a short window"
        await until(lambda: setup.link.can_publish)
        assert [setup.step() for _ in range(EVERY)][-1] == 8


async def test_it_applies_what_the_swarm_merged_and_keeps_its_own_progress(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        await until(lambda: setup.daemon.port.is_free(0))
        newer = setup.phi + (1 << 20)
        await setup.daemon.offer(0, newer, merged=1, own=0, version=2)
        await until(lambda: setup.link._offers)
        setup.step()
        assert np.allclose(setup.weights(), newer / ONE + 0.001, atol=1e-6)
        assert setup.peer.version == 2


async def test_an_image_without_our_own_last_delta_is_passed_over(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        while setup.step() is None:
            pass
        before = setup.weights()
        await until(lambda: setup.daemon.port.is_free(0))
        await setup.daemon.offer(0, setup.phi, merged=1, own=0, version=2)
        await until(lambda: setup.link._offers)
        setup.step()
        assert np.allclose(setup.weights(), before + 0.001, atol=1e-6)
        await until(lambda: setup.daemon.port.is_free(0))
        await setup.daemon.offer(0, setup.phi, merged=1, own=1, version=3)
        await until(lambda: setup.link._offers)
        setup.step()
        assert setup.peer.version == 3


async def test_callbacks_hear_of_every_phi_also_of_a_daemon_that_was_started_again(tmp_path: Path) -> None:
    """It counts its merges anew, and may offer several fragments before it has merged anything."""
    async with begun(tmp_path) as setup:
        versions: list[int] = []
        setup.peer.on_merged(lambda peer: versions.append(peer.version))
        await setup.offer(0, version=9)
        setup.step()
        assert versions == [9], "the model that it began with is no news"
        await setup.daemon.die()
        await until(lambda: not setup.link.is_attached)
        setup.daemon.start()
        await until(lambda: setup.link.is_attached)
        for _ in range(2):
            await setup.offer(0, version=0)
            setup.step()
        assert versions == [9, 0, 0] and setup.peer.version == 0
        setup.step()
        assert len(versions) == 3


# -- it never waits


async def test_a_frozen_daemon_does_not_hold_it_up(tmp_path: Path) -> None:
    """While this coroutine does not yield, the daemon's loop stands still, as after SIGSTOP."""
    async with begun(tmp_path) as setup:
        await asyncio.sleep(0.05)
        longest = 0.0
        published = []
        for _ in range(300):
            begun_at = time.perf_counter()
            if (round_ := setup.step()) is not None:
                published.append(round_)
            longest = max(longest, time.perf_counter() - begun_at)
        assert published == [1], "what is not acknowledged is not overtaken"
        assert longest < 1.0
        await until(lambda: 1 in setup.daemon.signed)


async def test_a_dead_daemon_does_not_hold_it_up_and_gets_the_delta_when_it_is_back(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        setup.daemon.answers = False
        while setup.step() is None:
            pass
        await until(lambda: setup.daemon.seen)
        await setup.daemon.die()
        await until(lambda: not setup.link._attached)
        for _ in range(100):
            assert setup.step() is None
        setup.daemon.answers = True
        setup.daemon.start()
        await until(lambda: setup.daemon.signed)
        await until(lambda: setup.link.can_publish)
        setup.daemon.port.send(control.Clock(1, 0))
        await until(lambda: setup.peer.clock == 1)
        assert setup.step() == 2, "the long window goes out at once"


async def test_the_share_of_time_away_from_training_is_counted(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        for _ in range(10):
            setup.step()
            time.sleep(0.01)
        assert 0 < setup.peer.wait_fraction < 1


# -- the end


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
        await asyncio.to_thread(setup.peer.flush, 5)
        assert list(setup.daemon.signed) == [1]

        setup.peer.drop_progress()
        await until(lambda: setup.daemon.port.is_free(0))
        newer = setup.phi + 4096
        await setup.daemon.offer(0, newer, merged=5, own=1, version=9)
        await until(lambda: setup.link._offers)
        assert setup.peer.settle()
        assert not setup.peer.settle()
        assert np.allclose(setup.weights(), newer / ONE, atol=1e-7)


async def test_a_node_that_the_swarm_has_stepped_over_is_finished_too(tmp_path: Path) -> None:
    async with begun(tmp_path, stop_round=3) as setup:
        setup.daemon.port.send(control.Clock(3, 0))
        await until(lambda: setup.peer.clock == 3)
        assert not setup.peer.finished
        setup.daemon.port.send(control.Clock(4, 0))
        await until(lambda: setup.peer.clock == 4)
        assert setup.peer.finished
        setup.step()
        await asyncio.to_thread(setup.peer.flush, 5)
        assert not setup.daemon.signed


async def test_nothing_is_at_rest_while_the_daemon_is_away(tmp_path: Path) -> None:
    """What the others published last may not have come before it died."""
    async with begun(tmp_path) as setup:
        assert not setup.peer.settle()
        await setup.daemon.die()
        await until(lambda: not setup.link.is_attached)
        assert setup.peer.settle()
        setup.daemon.start()
        await until(lambda: setup.link.is_attached)
        assert not setup.peer.settle()


async def test_leaving_publishes_the_open_window_once(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        setup.step()
        await asyncio.to_thread(setup.peer.flush, 5)
        assert list(setup.daemon.signed) == [1]
        await asyncio.to_thread(setup.peer.flush, 5)
        assert list(setup.daemon.signed) == [1], "an empty window is none"


async def test_leaving_publishes_the_open_window_once_the_last_delta_is_acknowledged(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        setup.daemon.acknowledges = False
        while setup.step() is None:
            pass
        setup.step()
        await until(lambda: setup.daemon.signed)
        leaving = asyncio.create_task(asyncio.to_thread(setup.peer.flush, 5))
        await asyncio.sleep(0)
        setup.daemon.acknowledges = True
        setup.daemon.port.send(control.Clock(1, 0))
        setup.daemon.port.send(control.Published(1))
        await leaving
        assert list(setup.daemon.signed) == [1, 2]


async def test_leaving_right_after_a_sleep_publishes_the_open_window(tmp_path: Path) -> None:
    """Where the swarm is has still to be heard: the window is as late as it is."""
    async with begun(tmp_path) as setup:
        setup.step()
        setup.daemon.port.send(control.Clock(-1, 0))
        await until(lambda: setup.link.clock == -1)
        for _ in range(3 * EVERY):
            assert setup.step() is None
        await asyncio.to_thread(setup.peer.flush, 5)
        assert list(setup.daemon.signed) == [1]
        assert setup.peer.clock == 1, "a script sees how far it is itself"


async def test_leaving_without_a_daemon_takes_no_longer_than_said(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        setup.daemon.answers = False
        while setup.step() is None:
            pass
        await setup.daemon.die()
        begun_at = time.monotonic()
        await asyncio.to_thread(setup.peer.flush, 0.3)
        assert time.monotonic() - begun_at < 3
        setup.daemon.start()


@pytest.mark.parametrize("error", [None, RuntimeError("as asked"), KeyboardInterrupt()])
async def test_what_a_script_that_never_left_publishes_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    """The interpreter keeps what it printed a traceback of."""
    monkeypatch.setattr("sys.last_value", error, raising=False)
    async with begun(tmp_path) as setup:
        assert setup.step() is None
        await asyncio.to_thread(setup.peer.leave_at_exit)
        assert setup.daemon.seen == ([] if isinstance(error, RuntimeError) else [1])
        setup.peer.abandon()
        assert setup.daemon.seen == ([] if isinstance(error, RuntimeError) else [1]), "only the first counts"


def fails(*_: Any) -> None:
    raise RuntimeError("out of memory")


def _error_between_steps(setup: Setup) -> None:
    pass


def _error_in_the_optimizers_step(setup: Setup) -> None:
    """Whether it ends the loop, or the script catches it and is ended by another."""
    with setup.optimizer.register_step_pre_hook(fails), contextlib.suppress(RuntimeError):
        setup.optimizer.step()


def _error_in_a_step_before_the_last(setup: Setup) -> None:
    _error_in_the_optimizers_step(setup)
    setup.step()


def _nothing_is_finite(setup: Setup) -> None:
    nn.init.constant_(setup.model.weight, torch.nan)


@pytest.mark.parametrize(
    ("what", "steps", "has_inner"),
    [
        (_error_between_steps, 2, True),
        (_error_in_the_optimizers_step, None, False),
        (_error_in_a_step_before_the_last, 3, True),
        (_nothing_is_finite, 2, False),
    ],
)
async def test_an_error_saves_what_it_left_whole_and_publishes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: Callable[[Setup], None],
    steps: int | None,
    has_inner: bool,
) -> None:
    monkeypatch.setattr(leader.CheckpointWriter, "is_due", lambda _: False)
    async with begun(tmp_path) as setup:
        for _ in range(2):
            for parameter in setup.model.parameters():
                parameter.grad = torch.ones_like(parameter)
            setup.optimizer.step()
            setup.step()
        what(setup)
        error = RuntimeError("a batch of another shape")
        await asyncio.to_thread(setup.peer.__exit__, RuntimeError, error, None)
        assert setup.daemon.seen == []
    assert (tmp_path / "c").exists() == (steps is not None)
    if steps is not None:
        saved = metadata_of(tmp_path / "c")
        assert int(saved["steps"]) == steps and ("inner" in saved) == has_inner


async def test_ctrl_c_within_the_optimizers_first_step_saves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what Adam needs would end every later start."""
    monkeypatch.setattr(leader.CheckpointWriter, "is_due", lambda self: False)
    async with begun(tmp_path) as setup:
        _error_in_the_optimizers_step(setup)
        await asyncio.to_thread(setup.peer.__exit__, KeyboardInterrupt, KeyboardInterrupt(), None)
    assert not (tmp_path / "c").exists()


async def test_what_cannot_be_saved_after_an_error_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device that has failed takes no more work."""
    monkeypatch.setattr(leader.CheckpointWriter, "save", fails)
    async with begun(tmp_path) as setup:
        setup.step()
        await asyncio.to_thread(setup.peer.abandon)
    assert f"cannot save the trainer's state to {tmp_path / 'c'}: out of memory" in caplog.text


async def test_an_error_before_the_first_step_leaves_what_was_saved_last(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        await asyncio.to_thread(setup.peer.abandon)
    assert not (tmp_path / "c").exists()


async def test_an_error_in_a_notebook_is_not_what_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.last_value", NameError("mistyped, before lunch"), raising=False)
    monkeypatch.setattr("sys.ps1", "In : ", raising=False)
    async with begun(tmp_path) as setup:
        assert setup.step() is None
        await asyncio.to_thread(setup.peer.leave_at_exit)
        assert setup.daemon.seen == [1]


async def test_leaving_stops_the_daemon_beside_also_where_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another Ctrl-C. In a notebook the folder would be in use until its kernel ends."""
    stopped: list[int] = []

    class DaemonBeside:
        must_stop = False

        def stop(self) -> None:
            stopped.append(1)

    def interrupted() -> None:
        raise KeyboardInterrupt

    async with begun(tmp_path) as setup:
        setup.peer._role.beside = DaemonBeside()  # type: ignore[assignment]
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(setup.link, "close", interrupted)
            setup.peer.leave()
        assert stopped == [1]


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


async def test_who_has_left_or_was_forked_off_trains_no_more(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        setup.peer._pid += 1
        for use in (setup.step, lambda: setup.peer.flush(1), setup.peer.drop_progress, setup.peer.settle):
            with pytest.raises(RuntimeError, match="not to those forked off"):
                use()
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


async def test_it_cannot_be_copied_along_with_a_model_that_holds_it(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        setup.model.peer = setup.peer
        with pytest.raises(TypeError, match="a Peer can be neither copied nor pickled"):
            copy.deepcopy(setup.model)


async def test_a_step_within_a_step_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with begun(tmp_path) as setup:
        with monkeypatch.context() as patched:
            patched.setattr(setup.peer._role, "step", lambda *_: setup.step())
            with pytest.raises(RuntimeError, match="step is running already"):
                setup.step()
        setup.step()
        assert setup.peer.metrics()["steps"] == 1


async def test_a_loop_without_gradients_may_run_in_inference_mode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step makes there (a checkpoint's copies) is changed outside of it, too."""
    monkeypatch.setattr(checkpointwriter, "INTERVAL_MAX_S", 0.0)
    async with begun(tmp_path) as setup:
        saved = tmp_path / "c"
        with torch.inference_mode():
            while not saved.exists():
                setup.step(torch.tensor(2.0))
        saved.unlink()
        while not saved.exists():
            setup.step(torch.tensor(2.0))
        assert setup.peer.last_loss == 2.0
        await until(lambda: setup.daemon.seen)


async def test_a_step_that_is_refused_leaves_nothing(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        with pytest.raises(ValueError, match="tokens is 0"):
            setup.peer.step(tokens=0, loss=1.0)
        with pytest.raises(ValueError, match=r"loss is .* of shape \[2\]"):
            setup.peer.step(tokens=1, loss=torch.ones(2))
        assert setup.peer.metrics()["tokens"] == 0
        assert [setup.step() for _ in range(EVERY)] == [None] * (EVERY - 1) + [1]


async def test_parameters_that_were_replaced_are_noticed_before_anything_is_published(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        setup.step()
        state = {name: value.clone() for name, value in setup.model.state_dict().items()}
        setup.model.load_state_dict(state, assign=True)
        with pytest.raises(ConfigError, match="'weight' was moved, resized or replaced"):
            for _ in range(EVERY):
                setup.step()
        assert setup.daemon.seen == []


async def test_what_the_swarm_merged_waits_for_a_model_that_is_put_right(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        await setup.offer(0, version=2)
        weight = setup.model.weight
        setup.model.weight = nn.Parameter(weight.detach().clone())
        with pytest.raises(ConfigError, match="'weight' was moved, resized or replaced"):
            setup.step()
        setup.model.weight = weight
        setup.step()
        assert setup.peer.version == 2
        await until(lambda: setup.daemon.port.is_free(0))


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


async def test_who_puts_right_what_diverged_and_leaves_loses_nothing(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        for _ in range(EVERY - 1):
            setup.step()
        sound = copy.deepcopy(setup.model.state_dict())
        nn.init.constant_(setup.model.weight, torch.nan)
        with pytest.raises(DivergedError):
            setup.step()
        setup.model.load_state_dict(sound)
        await asyncio.to_thread(setup.peer.leave)
        assert setup.daemon.seen == [1] and (tmp_path / "c").exists()


@pytest.mark.parametrize("puts_right", [False, True])
async def test_an_inner_state_that_the_model_diverged_with_is_not_kept(
    tmp_path: Path, puts_right: bool
) -> None:
    """It may be finite, as momentum after one batch of huge gradients is: the next process would diverge."""
    async with begun(tmp_path) as setup:
        setup.step()
        await asyncio.to_thread(setup.peer.flush, 5)
        assert "inner" in metadata_of(tmp_path / "c")
        setup.daemon.port.send(control.Clock(1, 0))
        await until(lambda: setup.link.can_publish and setup.peer.clock == 1)
        sound = copy.deepcopy(setup.model.state_dict())
        with pytest.raises(DivergedError):
            for _ in range(EVERY):
                nn.init.constant_(setup.model.weight, 1000.0)
                setup.step()
        if puts_right:
            setup.model.load_state_dict(sound)
            while setup.step() is None:
                pass
            await asyncio.to_thread(setup.peer.leave)
        else:
            await asyncio.to_thread(setup.peer.abandon)
    assert ("inner" in metadata_of(tmp_path / "c")) == puts_right


async def test_who_leaves_after_an_error_in_the_middle_of_a_change_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    async with begun(tmp_path) as setup:
        setup.step()
        await setup.offer(0, version=2)
        with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="out of memory"):
            patched.setattr(outer, "_take_over", fails)
            setup.step()
        await asyncio.to_thread(setup.peer.leave)
        assert setup.daemon.seen == []


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


async def test_a_step_that_publishes_leaves_what_was_merged_of_other_fragments_for_the_next(
    tmp_path: Path,
) -> None:
    async with begun(tmp_path, fragments=2) as setup:
        assert setup.step() is None
        await setup.offer(0, version=3)
        assert setup.step() == 1, "a round of fragment 1"
        assert setup.peer.version == 1 and not setup.link._offers
        setup.step()
        assert setup.peer.version == 3


async def test_of_several_fragments_half_wait_a_step(tmp_path: Path) -> None:
    async with begun(tmp_path, fragments=2) as setup:
        await setup.offer(0, version=3)
        await setup.offer(1, version=4)
        setup.step()
        assert setup.peer.version == 3
        setup.step()
        assert setup.peer.version == 4


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


async def test_who_leaves_while_another_thread_is_in_a_step_publishes_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the main thread does that ends before the one that trains: both would write one payload area."""
    async with begun(tmp_path) as setup:
        setup.step()
        order: list[str] = []
        entered, waited = threading.Event(), threading.Event()

        def step(*_: object) -> None:
            entered.set()
            waited.wait(20)
            order.append("step")

        def sleep(_: float) -> None:
            waited.set()

        monkeypatch.setattr(setup.peer._role, "step", step)
        monkeypatch.setattr(setup.peer._role, "flush", lambda _: (order.append("flush"), waited.set()))
        stepping = asyncio.create_task(asyncio.to_thread(setup.step))
        await asyncio.to_thread(entered.wait)
        with monkeypatch.context() as patched:
            patched.setattr(peer_module.time, "sleep", sleep)
            await asyncio.to_thread(setup.peer.leave)
        await stepping
        assert order == ["step", "flush"]
        with pytest.raises(RuntimeError, match="has left"):
            setup.step()
