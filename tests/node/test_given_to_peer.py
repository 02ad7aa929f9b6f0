"""What a script gives a `Peer` that it cannot mean is refused at once, in one line that says what to give."""

import itertools
import logging
import multiprocessing
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

from gossamer.node.trainer.beside import Beside
from gossamer.node.trainer.peer import Peer, mean_loss, token_count
from gossamer.node.trainer.ranks import Role, Team
from gossamer.protocol.errors import ConfigError


class Deeds(SimpleNamespace):
    """A role that notes in a file what it is asked to do."""

    def __init__(self, path: Path) -> None:
        seen = SimpleNamespace(swarm_tokens=0)
        super().__init__(
            taken=0, seen=seen, progress=SimpleNamespace(steps=0), node_id=bytes(32), resumed=True
        )
        self.path, self.beside = path, None
        self.is_stepping = self.was_terminated = False
        self.team = Team({})

    def _note(self, deed: str) -> None:
        with self.path.open("a") as file:
            file.write(deed + "\n")

    def begin(self, on_wait: object) -> bool:
        return True

    def flush(self, timeout_s: float) -> None:
        self._note("flushed")

    def save_if_whole(self) -> None:
        self._note("saved")

    def close(self) -> None:
        self._note("closed")


class Endless(IterableDataset[int]):
    """Samples that come as they come."""

    def __iter__(self) -> Iterator[int]:
        return itertools.count()


def deeds(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


def peer_of(path: Path) -> Peer:
    return Peer(nn.Linear(2, 2), cast(Role, Deeds(path)))


def children() -> multiprocessing.context.ForkServerContext:
    """Those of one process that has imported torch, which takes seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["gossamer.node.trainer.peer"])
    return context


def begin_and_end(path: Path, *, fails: bool) -> None:
    """A child's whole script, which leaves nothing itself."""
    peer_of(path)._begin_attached(lambda: None)
    if fails:
        raise SystemExit("the loop failed")


def tell_of_an_error_and_end(path: Path) -> None:
    peer_of(path)._begin_attached(lambda: None)
    try:
        raise ValueError("a batch failed, and is passed over")
    except ValueError:
        traceback.print_exc()


def begin_and_leave(path: Path) -> None:
    peer = peer_of(path)
    peer._begin_attached(lambda: None)
    peer.leave()


@pytest.mark.parametrize("tokens", [True, np.True_, torch.tensor([1, 2]), None, 1.5, 10**400])
def test_tokens_that_are_none(tokens: Any) -> None:
    with pytest.raises(ValueError, match="tokens is"):
        token_count(tokens)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(1).to_sparse(),
        lambda: torch.ones((), device="meta"),
        lambda: torch.nested.nested_tensor([torch.ones(1)]),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_loss_without_a_plain_value(make: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="plain number"):
        mean_loss(make())


def test_numbers_of_numpys(tmp_path: Path) -> None:
    shard = peer_of(tmp_path / "deeds").shard(range(8), fraction=cast(Any, np.float32(0.5)))
    assert len(shard) == 4


def test_a_callback_that_cannot_be_called(tmp_path: Path) -> None:
    peer = peer_of(tmp_path / "deeds")
    with pytest.raises(TypeError, match="takes a function of the peer, not None"):
        peer.on_merged(cast(Any, None))


@pytest.mark.parametrize("seconds", [None, "1", -1, float("nan")])
def test_times_that_are_none_end_nothing(tmp_path: Path, seconds: Any) -> None:
    path = tmp_path / "deeds"
    peer = peer_of(path)
    for call in (peer.flush, lambda s: peer.finish(timeout_s=s), lambda s: peer.finish(quiet_s=s)):
        with pytest.raises(ValueError, match="give seconds, 0 or more"):
            call(seconds)
    assert deeds(path) == []


@pytest.mark.parametrize("factor", [10**400, None, "1", -0.5, float("nan"), torch.ones(2)])
def test_a_schedule_that_gives_no_factor(tmp_path: Path, factor: Any) -> None:
    with pytest.raises(ValueError, match="a factor of 0 or more"):
        peer_of(tmp_path / "deeds").lr_scale(lambda tokens: factor)


def test_a_dataset_that_streams(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Endless has no length"):
        peer_of(tmp_path / "deeds").shard(cast(Any, Endless()))
    with pytest.raises(ConfigError, match="fraction is None"):
        peer_of(tmp_path / "deeds").shard([1, 2, 3], fraction=cast(Any, None))


def test_attaching_in_a_thread_says_that_sigterm_would_not_be_heard(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_DFL)
    with caplog.at_level(logging.WARNING, logger="gossamer.peer"):
        thread = threading.Thread(target=Beside().start)
        thread.start()
        thread.join()
    assert "call request_stop()" in caplog.text


@pytest.mark.parametrize(
    ("script", "options", "done"),
    [
        (begin_and_end, {"fails": False}, ["flushed", "closed"]),
        (begin_and_end, {"fails": True}, ["flushed", "closed"]),
        (begin_and_leave, {}, ["flushed", "closed"]),
        (tell_of_an_error_and_end, {}, ["flushed", "closed"]),
    ],
    ids=["ends", "exits", "leaves", "tells of an error"],
)
def test_a_child_of_multiprocessing_leaves_as_it_ends(
    tmp_path: Path, script: Any, options: dict[str, bool], done: list[str]
) -> None:
    path = tmp_path / "deeds"
    child = children().Process(target=script, args=(path,), kwargs=options)
    child.start()
    child.join(60)
    assert child.exitcode == (1 if options.get("fails") else 0)
    assert deeds(path) == done


def fail(path: Path) -> None:
    peer_of(path)._begin_attached(lambda: None)
    raise ValueError("the loop failed")


def test_a_child_that_fails_publishes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "deeds"
    child = children().Process(target=fail, args=(path,))
    child.start()
    child.join(60)
    assert child.exitcode == 1
    assert deeds(path) == ["saved", "closed"]
