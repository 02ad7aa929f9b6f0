"""Gossamer, as a script with `Peer.attach`, in a swarm that `gossamer init` wrote, with nothing else set."""

from pathlib import Path

from benchmarks.peers.job import Job
from gossamer.node import Peer

job = Job()
model, optimizer = job.model, job.optimizer
folder = Path(job.entry.folder)
with Peer.attach(
    model,
    optimizer,
    manifest=folder / "swarm.toml",
    join=[f"{job.entry.coordinator}:7700"],
    folder=folder / f"node{job.entry.rank}",
    listen=f"{job.entry.host}:7700",
) as peer:
    for batch in job.batches():
        loss = job.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        peer.step(tokens=job.tokens(batch), loss=loss)
        if job.is_marked:
            job.keep(model, "marklive")
            with peer.average():
                job.keep(model, "mark")
        job.note("joined")
    peer.finish(quiet_s=4.0)
    job.keep(model, "end")
    with peer.average():
        job.keep(model, "average")
