"""hivemind's Optimizer with local updates, as its quickstart has it.

Changed: `host_maddrs`, as its documents say for several machines, and the initial peer is `hivemind-dht` on a
host of its own; epochs and times, see the settings; both are shut down in the end.
"""

import hivemind
from hivemind.compression import NoCompression, Uniform8BitQuantization

from benchmarks.peers.job import Job

if __name__ == "__main__":
    job = Job()
    entry, settings, model = job.entry, job.entry.settings, job.model
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{entry.host}/tcp/0"],
        initial_peers=[settings["initial_peer"]],
        start=True,
    )
    compression = Uniform8BitQuantization() if settings["quantize"] else NoCompression()
    opt = hivemind.Optimizer(
        dht=dht,
        run_id="peers",
        batch_size_per_step=entry.options["batch_size"],
        target_batch_size=settings["epoch_steps"] * entry.workers * entry.options["batch_size"],
        optimizer=job.optimizer,
        use_local_updates=True,
        matchmaking_time=settings["matchmaking_s"],
        averaging_timeout=settings["averaging_s"],
        state_averaging_compression=compression,
        averager_opts={"request_timeout": settings["request_s"]},
        verbose=True,
    )
    if entry.life:
        opt.load_state_from_peers()
    for batch in job.batches():
        opt.zero_grad()
        loss = job.loss(model, batch)
        loss.backward()
        opt.step()
        if job.is_marked:
            job.keep(model, "mark")
        job.note("joined")
    job.keep(model, "end")
    opt.shutdown()
    dht.shutdown()
