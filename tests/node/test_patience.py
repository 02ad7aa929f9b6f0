"""Waiting for other ranks: only what says that they are gone may be called that."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gossamer.node.trainer.ranks import Patience
from gossamer.protocol.errors import UnreachableError
from tests.node.gloo import two_ranks


def ended() -> None:
    one, other = two_ranks(30.0)
    del other
    one.allreduce([torch.zeros(1)]).wait()


def silent() -> None:
    one, _other = two_ranks(0.1)
    one.allreduce([torch.zeros(1)]).wait()


def no_store() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.01))
    store.get("address")


def nccl(result: str) -> Callable[[], None]:
    def fail() -> None:
        raise dist.DistBackendError(
            f"NCCL error in: ProcessGroupNCCL.cpp:1, NCCL version 2.27\n{result}: ..."
        )

    return fail


def no_memory() -> None:
    torch.empty(10**15)


def shapes_differ() -> None:
    torch.zeros(2).copy_(torch.zeros(3))


def sizes_differ() -> None:
    raise RuntimeError(
        "[enforce fail at gloo/transport/tcp/pair.cc:455] op.preamble.length <= op.nbytes. 8 vs 4"
    )


def test_who_waits_no_more_leaves_no_thread_behind() -> None:
    patience = Patience()
    with patience.during("waiting"):
        pass
    patience.close()
    patience._thread.join(10)
    assert not patience._thread.is_alive()


@pytest.mark.parametrize("fail", [ended, silent, no_store, nccl("ncclRemoteError")])
def test_ranks_that_are_gone_are_said_to_be(fail: Callable[[], None]) -> None:
    with pytest.raises(UnreachableError, match="lost the other ranks of this node: one of them ended"):
        during(fail)


@pytest.mark.parametrize("fail", [no_memory, shapes_differ, sizes_differ, nccl("ncclUnhandledCudaError")])
def test_whatever_else_goes_wrong_meanwhile_comes_through_as_what_it_is(fail: Callable[[], None]) -> None:
    with pytest.raises(RuntimeError) as expected:
        fail()
    with pytest.raises(expected.type) as found:
        during(fail)
    assert str(found.value) == str(expected.value)


def test_an_error_without_words_comes_through() -> None:
    def fail() -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        during(fail)


def during(fail: Callable[[], None]) -> None:
    patience = Patience()
    try:
        with patience.during("waiting"):
            fail()
    finally:
        patience.close()
