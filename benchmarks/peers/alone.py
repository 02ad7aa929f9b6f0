"""The loop alone: no worker knows of another."""

from benchmarks.peers.job import Job

job = Job()
model, optimizer = job.model, job.optimizer
for batch in job.batches():
    loss = job.loss(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if job.is_marked:
        job.keep(model, "mark")
    job.note("joined")
job.keep(model, "end")
