"""What ranks hand to one another. Whole nodes of several ranks are in `tests/net/test_ranks.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from gossamer.bootstrap.manifests import describe
from gossamer.node.trainer import ranks
from gossamer.node.trainer.parameters import check_fits, parameters_of
from gossamer.node.trainer.ranks import Rank, RankContext, Team, Word
from gossamer.protocol.errors import ConfigError, UnreachableError
from gossamer.protocol.payloads import Layout, TensorSpec, plan
from tests.net.processes import wait_for
from tests.node.gloo import two_ranks


class Distributed:
    """torch.distributed, as far as `Team` needs it, for two ranks that are threads of this process."""

    def __init__(self) -> None:
        self._ends = two_ranks(60.0)
        self._mine = threading.local()

    def run(self, work: Callable[[int], None]) -> None:
        def as_rank(rank: int) -> None:
            self._mine.rank = rank
            work(rank)

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(as_rank, range(2)))

    def get_rank(self) -> int:
        return int(self._mine.rank)

    def get_world_size(self) -> int:
        return 2

    def new_group(self, backend: str) -> None:
        pass

    def barrier(self, group: None = None) -> None:
        self._ends[self._mine.rank].barrier().wait()

    def broadcast(self, tensor: Tensor, source: int, group: None = None) -> None:
        self._ends[self._mine.rank].broadcast(tensor, root=source).wait()


def layout_of(tensors: Sequence[Tensor], fragments: int = 1) -> Layout:
    specs = [TensorSpec(str(i), tuple(tensor.shape), "mean") for i, tensor in enumerate(tensors)]
    return plan(specs, fragments)


def laid_out(rank: int) -> list[Tensor]:
    """What lies in memory in several ways, the last in another on each rank, and all that is around it."""
    columns = torch.arange(40.0).view(4, 10) + 100 * rank
    channels = torch.arange(24.0).view(2, 3, 2, 2) + 100 * rank
    channels_last = channels.to(memory_format=torch.channels_last)
    last = channels_last if rank else channels
    return [columns[:, ::2], columns[:, 1:4:2], columns[:, 5::2].T, channels_last, last, columns]


def test_all_ranks_get_the_firsts_parameters_however_they_lie_in_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    distributed = Distributed()
    monkeypatch.setattr(ranks, "dist", distributed)
    held = [laid_out(0), laid_out(1)]

    def exchange(rank: int) -> None:
        shared = held[rank][:-1]
        team = Team({str(i): tensor for i, tensor in enumerate(shared)}, alone=False)
        team.bind(layout_of(shared))
        with team.full(frozenset([0])):
            pass
        team.close()

    distributed.run(exchange)
    for ours, firsts in zip(held[1][:-1], laid_out(0), strict=False):
        assert torch.equal(ours, firsts)
    assert all(map(torch.equal, held[0], laid_out(0)))
    untouched = laid_out(1)[-1]
    for columns in (held[1][-1], untouched):
        columns[:, ::2], columns[:, 1:4:2], columns[:, 5::2] = 0, 0, 0
    assert torch.equal(held[1][-1], untouched), "what lies between them is somebody else's"


@pytest.mark.parametrize("transposed", [False, True])
def test_of_a_tensor_in_two_fragments_a_strip_is_given(
    monkeypatch: pytest.MonkeyPatch, transposed: bool
) -> None:
    distributed = Distributed()
    monkeypatch.setattr(ranks, "dist", distributed)
    held = [torch.full((300, 500), float(rank)) for rank in range(2)]
    held = [tensor.T.contiguous().T if transposed else tensor for tensor in held]
    layout = layout_of([held[0]], 2)
    (slot,) = layout.fragments[1].slots
    assert slot.is_cut

    def exchange(rank: int) -> None:
        team = Team({"0": held[rank]}, alone=False)
        team.bind(layout)
        with team.full(frozenset([1])):
            if rank == 0:
                held[0].fill_(2.0)
        team.close()

    distributed.run(exchange)
    expected = torch.ones(300 * 500)
    expected[slot.strip] = 2.0
    assert torch.equal(held[1].reshape(-1), expected)


def test_a_rank_that_waits_for_others_to_attach_says_so_whichever_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Late(Distributed):
        def new_group(self, backend: str) -> None:
            wait_for(lambda: "(waited" in caplog.text, 60.0, "it says what it waits for")

    monkeypatch.setattr(ranks, "LOG_AFTER_S", 0.0)
    monkeypatch.setattr(ranks, "WATCH_EVERY_S", 0.01)
    distributed = Late()
    monkeypatch.setattr(ranks, "dist", distributed)

    def attach(rank: int) -> None:
        if rank > 0:
            Team({}, alone=False).close()

    distributed.run(attach)


@pytest.mark.parametrize("silent", [False, True])
def test_a_rank_that_ends_instead_of_attaching_is_logged_as_gone(
    monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    class Gone(Distributed):
        def new_group(self, backend: str) -> None:
            one, other = two_ranks(60.0)
            if not silent:
                del other
            options = torch.distributed.AllreduceOptions()
            options.timeout = timedelta(seconds=0.1)
            one.allreduce([torch.zeros(1)], options).wait()

    distributed = Gone()
    monkeypatch.setattr(ranks, "dist", distributed)

    def attach(rank: int) -> None:
        with pytest.raises(UnreachableError, match="cannot reach the other ranks of this node"):
            Team({}, alone=False)

    distributed.run(attach)
    for thread in [thread for thread in threading.enumerate() if thread.name == "wait-watch"]:
        thread.join(60)
        assert not thread.is_alive(), "nobody could end it any more"


def test_processes_of_torchrun_that_attach_before_they_are_ranks_are_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks.team_of({}, nn.Linear(1, 1))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "1")
    ranks.team_of({}, nn.Linear(1, 1))
    assert not caplog.text
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ranks.team_of({}, nn.Linear(1, 1)).size == 1
    assert "torchrun started 2 processes, and each of them becomes a node of its own" in caplog.text


@contextmanager
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


runs_fsdp2_on_a_cpu = pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="this PyTorch's FSDP2 does not run on a CPU"
)


def sharded() -> nn.Module:
    """With a layer of its own, and two that are the root's."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    fully_shard(model[1], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def evaluated(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(torch.ones(1, 4))


@runs_fsdp2_on_a_cpu
def test_a_model_that_fsdp2_shards_computes_with_what_it_was_given_also_after_an_evaluation() -> None:
    with one_rank():
        model = sharded()
        tensors = parameters_of(model)
        team = Team(tensors, model, alone=False)
        specs = [TensorSpec(name, tuple(tensor.shape), "mean") for name, tensor in tensors.items()]
        full = team.bind(plan(specs, 1))
        assert evaluated(model) != 0
        with torch.no_grad(), team.full(frozenset([0])):
            for tensor in full.values():
                tensor.zero_()
        assert evaluated(model) == 0
        team.close()


def test_shards_on_some_of_the_ranks_are_refused() -> None:
    """The first could not give the others anything."""
    described = describe(nn.Linear(4, 4), name="t")
    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
        some, all_of_them = (fully_shard(nn.Linear(4, 4), mesh=mesh) for mesh in (grid["shards"], grid))
        check_fits(parameters_of(all_of_them), described)
        with pytest.raises(ConfigError, match="'weight' is sharded over 2 of the 4 ranks"):
            check_fits(parameters_of(some), described)
    finally:
        torch.distributed.destroy_process_group()


# -- a rank other than the first, which does what the first has decided


class Second(Team):
    """One of two ranks; the first says that a fragment changes."""

    def __init__(self) -> None:
        super().__init__({})
        self.rank, self.size = 1, 2

    def agree(self, word: Word) -> Word:
        return word._replace(touched=frozenset([0]))


def test_a_parameter_that_only_this_rank_has_replaced_is_an_error_before_the_next_change() -> None:
    model = nn.Linear(4, 2)
    follower = Rank(model, describe(model, name="test"), b"", RankContext(Second()))
    follower.step(1, 0.0)
    model.weight = nn.Parameter(model.weight.detach().clone())
    with pytest.raises(ConfigError, match="'weight' was moved, resized or replaced"):
        follower.step(1, 0.0)
    with pytest.raises(ConfigError, match="'weight' was moved, resized or replaced"):
        follower.drop_progress()
