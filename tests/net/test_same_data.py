"""Scripts that go through the same data together, as real processes; counted from their signed records."""

from __future__ import annotations

import signal
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from gossamer.node.daemon.storage.records import RecordStore
from gossamer.node.home import Home
from gossamer.node.trainer.draws import Order
from gossamer.protocol.blocks import runs_in
from tests.net.processes import gossamer_status, wait_for
from tests.net.scripts import PATIENCE_S, Scripts, scripts_in

SAMPLES = 20_000

pytestmark = pytest.mark.slow


def claimed(scripts: Scripts, name: str) -> dict[bytes, Counter[tuple[int, int]]]:
    """By author: the samples claimed in the records that a node holds, each with its epoch."""
    data, found = scripts.described.data, defaultdict[bytes, Counter[tuple[int, int]]](Counter)
    records = RecordStore(Home(scripts.base / name).ledger_path, scripts.swarm_id, read_only=True)
    orders = {epoch: Order(SAMPLES, scripts.swarm_id, epoch).part(0, SAMPLES) for epoch in range(9)}
    for delta in records.load(scripts.described.plan()):
        for run in runs_in(delta.body.blocks):
            first, stop = (SAMPLES * block // data.blocks for block in run)
            epoch = delta.body.epoch
            found[delta.author].update((epoch, int(n)) for n in orders[epoch][first:stop])
    records.close()
    return found


def trained(scripts: Scripts, name: str, rank: int = 0) -> Counter[int]:
    lines = (scripts.base / f"{name}.{rank}.drawn").read_text().splitlines()
    return Counter(int(number) for line in lines for number in line.split())


@pytest.mark.timeout(400)
def test_a_swarm_sees_all_of_the_data_although_one_is_killed_and_one_joins(tmp_path: Path) -> None:
    with scripts_in(tmp_path, samples=SAMPLES) as scripts:
        scripts.start("one", samples=SAMPLES, pause=0.03)
        address = scripts.address("one")
        for name in ("two", "three"):
            scripts.start(name, join=[address], samples=SAMPLES, pause=0.03, workers=2)
        for name in ("two", "three"):
            scripts.wait_rounds(name, 10)
        killed = Home(tmp_path / "two").identity().node_id
        scripts.daemon("two").send_signal(signal.SIGKILL)
        scripts.processes["two"].kill()
        scripts.start("four", join=[address], samples=SAMPLES, pause=0.03)
        scripts.wait_rounds("four", 5)

        def shown() -> dict[str, float] | None:
            status = gossamer_status(address)
            return status["data"] if status and status["data"]["epoch"] else None

        data = wait_for(shown, 4 * PATIENCE_S, "the first epoch to end")
        (tmp_path / "stop").touch()
        ids = {}
        for name in ("one", "three", "four"):
            (result,) = scripts.results(name)
            ids[bytes.fromhex(result["node_id"])] = name
        ids[killed] = "two"
        by_author = claimed(scripts, "one")
        assert set(by_author) == set(ids)
        for author, samples in by_author.items():
            done = trained(scripts, ids[author])
            claims = Counter(sample for _, sample in samples.elements())
            assert claims <= done, f"{ids[author]} claims what it has not trained on"
        union = sum(by_author.values(), Counter[tuple[int, int]]())
        first = [count for (epoch, _), count in union.items() if epoch == 0]
        assert len(first) >= 0.99 * SAMPLES
        assert sum(first) <= 1.3 * SAMPLES, "in so short an epoch, some are drawn twice"
        assert data["before_seen"] >= 0.99
        unpublished = set(trained(scripts, "two")) - {sample for _, sample in by_author[killed]}
        others = {sample for author in ids if author != killed for _, sample in by_author[author]}
        assert len(unpublished - others) <= 0.01 * SAMPLES, "what the killed node took with it is drawn again"


@pytest.mark.timeout(400)
def test_ranks_of_one_node_share_out_what_they_draw_and_claim_it_together(tmp_path: Path) -> None:
    with scripts_in(tmp_path, samples=SAMPLES) as scripts:
        scripts.start("one", ranks=2, how="ddp", samples=SAMPLES, workers=1)
        scripts.wait_rounds("one", 12)
        (tmp_path / "stop").touch()
        results = scripts.results("one", ranks=2)
        (samples,) = claimed(scripts, "one").values()
        done = [trained(scripts, "one", rank) for rank in (0, 1)]
        assert not done[0].keys() & done[1].keys(), "each walks in a part of its own"
        assert set(samples.values()) == {1}
        claims = {sample for _, sample in samples}
        assert claims <= (done[0] | done[1]).keys()
        assert all(len(claims & of_rank.keys()) >= len(of_rank) / 2 for of_rank in done)
        assert results[0]["digest"] == results[1]["digest"]
