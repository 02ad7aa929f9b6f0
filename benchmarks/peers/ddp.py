"""DistributedDataParallel over gloo, as PyTorch's tutorial has it."""

import os

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.job import Job

job = Job()
os.environ.update(MASTER_ADDR=job.entry.settings["master"], MASTER_PORT="29500")
dist.init_process_group("gloo", rank=job.entry.rank, world_size=job.entry.workers)
model, optimizer = DistributedDataParallel(job.model), job.optimizer
for batch in job.batches(ends_itself=True):
    loss = job.loss(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if job.is_marked:
        job.keep(model, "mark")
    job.note("joined")
    if job.ends_at(job.steps, ahead=3):
        break
job.keep(model, "end")
dist.destroy_process_group()
