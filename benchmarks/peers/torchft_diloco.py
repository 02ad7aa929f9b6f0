"""torchft's DiLoCo over gloo, as its train_diloco.py has it.

Changed: the store that torchrun makes is made here, and hosts have addresses, since network namespaces share
one host name; `init_sync` is off, as its documents say for models that begin alike; a `Manager` is shut down
in the end.
"""

import socket

from benchmarks.peers.job import Job

job = Job()
host = job.entry.host
socket.gethostname = lambda: host  # before torchft reads it

from datetime import timedelta  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torchft import Manager, ProcessGroupGloo  # noqa: E402
from torchft.checkpointing.http_transport import HTTPTransport  # noqa: E402
from torchft.local_sgd import DiLoCo  # noqa: E402

settings = job.entry.settings
model, optimizer = job.model, job.optimizer
outer = torch.optim.SGD(model.parameters(), lr=settings["lr"], momentum=settings["momentum"], nesterov=True)


def load_state_dict(state: dict[str, Any]) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["inner_optim"])
    outer.load_state_dict(state["outer_optim"])


def state_dict() -> dict[str, Any]:
    return {
        "model": model.state_dict(),
        "inner_optim": optimizer.state_dict(),
        "outer_optim": outer.state_dict(),
    }


store = dist.TCPStore(host, 29501, is_master=True, wait_for_workers=False)
manager = Manager(
    pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
    use_async_quorum=False,
    min_replica_size=1,
    load_state_dict=load_state_dict,
    state_dict=state_dict,
    replica_id=f"train_diloco_{job.entry.rank}",
    timeout=timedelta(seconds=30),
    checkpoint_transport=HTTPTransport(timeout=timedelta(seconds=10), num_chunks=0),
    init_sync=False,
    rank=0,
    world_size=1,
    store_addr=host,
    store_port=store.port,
    lighthouse_addr=f"http://{job.entry.coordinator}:29510",
)
with DiLoCo(
    manager,
    [model],
    optimizer,
    outer,
    backup_device=torch.device("cpu"),
    sync_every=settings["sync_every"],
    fragment_sync_delay=settings["delay"],
    should_quantize=settings["quantize"],
):
    for batch in job.batches(ends_itself=True):
        optimizer.zero_grad()
        loss = job.loss(model, batch)
        loss.backward()
        optimizer.step()
        if job.is_marked:
            job.keep(model, "mark")
        if manager.current_step() > 0:
            job.note("joined")
        if job.ends_at(manager.current_step(), ahead=1):
            break
job.keep(model, "end")
manager.shutdown()
