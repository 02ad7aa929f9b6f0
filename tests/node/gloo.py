"""A group of two ranks within one process."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch.distributed as dist


def two_ranks(timeout_s: float) -> list[dist.ProcessGroupGloo]:
    """Both ends of a gloo group."""
    store = dist.HashStore()
    ends: dict[int, dist.ProcessGroupGloo] = {}

    def connect(rank: int) -> None:
        ends[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=timeout_s))

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [ends[0], ends[1]]
