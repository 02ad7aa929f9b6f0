"""`gossamer.node.trainer.peer`: it publishes when the pace says so, applies what comes, and never waits."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gossamer.node.ipc import messages as control
from gossamer.node.trainer import checkpoint as checkpointwriter
from gossamer.node.trainer import outer, phi_updates
from gossamer.node.trainer.checkpoint import Progress
from gossamer.node.trainer.peer import mean_loss, token_count
from gossamer.protocol.errors import ConfigError, StorageError
from gossamer.protocol.fixedpoint import ONE
from tests.node.begun_peer import EVERY, begun, manifest_for
from tests.node.leading import leading
from tests.node.trainer_side import daemon_at, link_to, until

pytestmark = pytest.mark.usefixtures("reconnects_at_once")


async def test_it_begins_with_the_swarms_model(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        assert np.allclose(setup.weights(), setup.phi / ONE, atol=1e-7)
        assert setup.peer.version == 1
        await until(lambda: setup.daemon.port.is_free(0))


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


@pytest.mark.parametrize("trains", [False, True])
async def test_a_loop_that_trains_something_else_is_told_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, trains: bool
) -> None:
    async with begun(tmp_path) as setup:
        for round_ in (1, 2, 3):
            await until(lambda: setup.link.can_publish)
            for _ in range(EVERY):
                if trains:
                    setup.step()
                else:
                    setup.peer.step(tokens=10, loss=2.0)
            assert setup.peer.round == round_
            setup.daemon.port.send(control.Clock(round_, 0))
            await until(lambda now=round_: setup.peer.clock == now)
        assert caplog.text.count("no parameter has changed for 2 rounds") == (not trains)


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


async def test_a_callback_that_was_interrupted_hears_of_that_phi_at_the_next_step(tmp_path: Path) -> None:
    """It may be what keeps a copy of the parameters elsewhere: the old one would be taken for progress."""
    async with begun(tmp_path) as setup:
        came: list[str] = []

        def interrupted(_: object) -> None:
            came.append("first")
            if len(came) == 1:
                raise KeyboardInterrupt

        setup.peer.on_merged(interrupted)
        setup.peer.on_merged(lambda _: came.append("second"))
        await setup.offer(0, version=9)
        with pytest.raises(KeyboardInterrupt):
            setup.step()
        setup.step()
        setup.step()
        assert came == ["first", "first", "second"]


async def test_a_step_within_a_step_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with begun(tmp_path) as setup:
        with monkeypatch.context() as patched:
            patched.setattr(setup.peer._role, "step", lambda *_: setup.step())
            with pytest.raises(RuntimeError, match="step is already running"):
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
        with pytest.raises(ValueError, match="loss is"):
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


# -- it never waits


async def test_a_frozen_daemon_does_not_hold_it_up(tmp_path: Path) -> None:
    """While this coroutine does not yield, the daemon's loop stands still, as after SIGSTOP."""
    async with begun(tmp_path) as setup:
        await until(lambda: setup.link.can_publish)
        longest = 0.0
        published = []
        for _ in range(300):
            begun_at = time.perf_counter()
            if (round_ := setup.step()) is not None:
                published.append(round_)
            longest = max(longest, time.perf_counter() - begun_at)
        assert published == [1], "what is not acknowledged is not overtaken"
        assert longest < 10.0
        await until(lambda: 1 in setup.daemon.signed)


async def test_a_dead_daemon_does_not_hold_it_up_and_gets_the_delta_when_it_is_back(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        setup.daemon.answers = False
        while setup.step() is None:
            pass
        await until(lambda: setup.daemon.seen)
        await setup.daemon.die()
        await until(lambda: not setup.link.is_attached)
        for _ in range(100):
            assert setup.step() is None
        setup.daemon.answers = True
        setup.daemon.start()
        await until(lambda: setup.daemon.signed)
        await until(lambda: setup.link.can_publish)
        setup.daemon.port.send(control.Clock(1, 0))
        await until(lambda: setup.peer.clock == 1)
        assert setup.step() == 2, "the long window goes out at once"


# -- what a script cannot mean


@pytest.mark.parametrize("tokens", [7, 7.0, np.int64(7), np.float32(7), torch.tensor(7), torch.tensor([7.0])])
def test_tokens_in_any_kind_of_number(tokens: Any) -> None:
    count = token_count(tokens)
    assert type(count) is int and count == 7


@pytest.mark.parametrize(
    "tokens", [0, 1.5, math.nan, math.inf, None, "7", torch.tensor([7, 7]), torch.tensor(2.5), 2**41]
)
def test_tokens_that_are_none(tokens: Any) -> None:
    with pytest.raises(ValueError, match=r"tokens is .*a whole number from 1 to 2\*\*40"):
        token_count(tokens)


def test_a_loss_in_any_kind_of_number_loses_its_graph() -> None:
    for loss in (0.5, np.float32(0.5), torch.tensor(0.5), torch.tensor([0.5], requires_grad=True) * 1):
        mean = mean_loss(loss)
        assert float(mean) == 0.5 and not getattr(mean, "requires_grad", False)
    for wrong in (None, "low", 10**400, torch.ones(2), torch.ones(0)):
        with pytest.raises(ValueError, match="loss is .*one number"):
            mean_loss(wrong)  # type: ignore[arg-type]


async def test_a_schedule_or_a_dataset_that_will_not_do(tmp_path: Path) -> None:
    async with begun(tmp_path) as setup:
        for factor in (-0.5, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="a factor of 0 or more"):
                setup.peer.lr_scale(lambda tokens, factor=factor: factor)  # type: ignore[misc]
        with pytest.raises(ConfigError, match="generator has no length"):
            setup.peer.shard(iter_of := (n for n in range(3)))  # type: ignore[arg-type]
        assert list(iter_of) == [0, 1, 2]
        with pytest.raises(ConfigError, match="fraction is None"):
            setup.peer.shard([1, 2, 3], fraction=None)  # type: ignore[arg-type]


async def test_it_reports_twice_a_second_at_the_speed_of_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are counted over all runs: one that goes on has not made those in its first seconds."""
    async with begun(tmp_path) as setup:
        sent: list[control.Report] = []
        monkeypatch.setattr(setup.link, "send", sent.append)
        now = 1000.0
        monkeypatch.setattr(outer.time, "monotonic", lambda: now)
        setup.peer.report("joining")
        setup.peer._role.progress = Progress(10**6, 10**9)  # the checkpoint is restored
        for step in range(1, 21):
            now += outer.REPORT_EVERY_S
            setup.peer._role.progress = Progress(10**6 + step, 10**9 + 100 * step)
            for _ in range(2):
                setup.peer.report("training")
        assert [report.tokens for report in sent] == [0, *(10**9 + 100 * step for step in range(1, 21))]
        unmeasured = int(outer.RATE_OVER_S / outer.REPORT_EVERY_S) + 2
        assert {report.tokens_per_s for report in sent[:unmeasured]} == {0.0}
        assert {report.tokens_per_s for report in sent[unmeasured:]} == {100 / outer.REPORT_EVERY_S}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_the_averaged_model_is_there_for_an_evaluation_and_the_live_one_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    async with begun(tmp_path, dtype=dtype) as setup:
        mean = setup.phi + ONE
        monkeypatch.setattr(phi_updates, "averaged", lambda home: (setup.daemon.manifest, None, mean))
        setup.step()
        live = setup.weights()
        with pytest.raises(KeyboardInterrupt), setup.peer.average():
            assert np.allclose(setup.weights(), mean / ONE, atol=torch.finfo(dtype).eps)
            setup.peer.request_stop()
            assert not setup.daemon.signed, "the average is not what this node has learnt"
            for inside in (setup.step, setup.peer.finish, setup.peer.average().__enter__):
                with pytest.raises(RuntimeError, match="averaged model is in the place"):
                    inside()
            raise KeyboardInterrupt
        assert np.array_equal(setup.weights(), live)
        await asyncio.to_thread(setup.peer.leave)
        assert list(setup.daemon.signed) == [1], "what was learnt before is"
        with torch.inference_mode(), setup.peer.average():  # as trainers evaluate
            assert np.allclose(setup.weights(), mean / ONE, atol=torch.finfo(dtype).eps), "also afterwards"
        setup.model(torch.ones(1, 30, dtype=dtype)).sum().backward()


@pytest.mark.parametrize("inside", [("eval",), ("eval", "train"), ()])
async def test_an_optimizer_that_moves_the_model_to_evaluate_it_never_moves_the_average(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: tuple[str, ...]
) -> None:
    """As ScheduleFree does when its mode changes, wherever a loop changes it."""
    async with begun(tmp_path) as setup:
        monkeypatch.setattr(
            phi_updates, "averaged", lambda home: (setup.daemon.manifest, None, setup.phi + ONE)
        )
        (group,) = setup.optimizer.param_groups
        group["train_mode"] = True

        def become(trains: bool) -> None:
            if group["train_mode"] is not trains:
                group["train_mode"] = trains
                setup.model.weight.data.add_(1 if trains else -1)

        monkeypatch.setattr(setup.optimizer, "eval", lambda: become(False), raising=False)
        monkeypatch.setattr(setup.optimizer, "train", lambda: become(True), raising=False)
        live = setup.weights()
        with setup.peer.average():
            for mode in inside:
                assert np.allclose(setup.weights(), (setup.phi + ONE) / ONE, atol=1e-6)
                getattr(setup.optimizer, mode)()
        assert group["train_mode"] and np.allclose(setup.weights(), live, atol=1e-6)


async def test_ctrl_c_while_the_average_is_put_into_the_model_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with begun(tmp_path) as setup:
        mean, put = setup.phi + ONE, torch.Tensor.copy_
        monkeypatch.setattr(phi_updates, "averaged", lambda home: (setup.daemon.manifest, None, mean))
        setup.step()
        live = setup.weights()

        def interrupted(tensor: torch.Tensor, values: torch.Tensor) -> None:
            monkeypatch.setattr(torch.Tensor, "copy_", put)
            tensor.copy_(values)
            raise KeyboardInterrupt

        monkeypatch.setattr(torch.Tensor, "copy_", interrupted)
        with pytest.raises(KeyboardInterrupt), setup.peer.average():
            pytest.fail("entered")
        assert np.array_equal(setup.weights(), live)
        setup.peer.request_stop()
        assert setup.peer.round == 1, "what was learnt is published"


async def test_an_average_that_is_not_here_yet_leaves_the_model_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetching(home: object) -> None:
        raise StorageError("still fetching")

    async with begun(tmp_path) as setup:
        monkeypatch.setattr(phi_updates, "averaged", fetching)
        live = setup.weights()
        with pytest.raises(StorageError, match="still fetching"), setup.peer.average():
            pytest.fail("entered")
        assert np.array_equal(setup.weights(), live)
