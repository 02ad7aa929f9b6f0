"""Members of a swarm of which only some contribute to a round, as real processes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from gossamer.node.daemon.storage.records import RecordStore
from gossamer.node.home import Home
from gossamer.protocol.sampling import EVERY_ROUND, is_drawn
from tests.net.processes import gossamer_status, wait_for
from tests.net.scripts import PATIENCE_S, scripts_in

NAMES = ("one", "two", "three", "four")

pytestmark = pytest.mark.slow


@pytest.mark.timeout(300)
def test_four_members_of_whom_two_contribute_to_a_round_end_identical(tmp_path: Path) -> None:
    with scripts_in(tmp_path, contributors=2) as scripts:
        scripts.start("one")
        address = scripts.address("one")
        for name in NAMES[1:]:
            scripts.start(name, join=[address])

        def in_turn() -> bool:
            status = gossamer_status(address)
            return status is not None and status["turn"] > 1.5

        wait_for(in_turn, 3 * PATIENCE_S, "members to take turns")
        begun = scripts.metrics("one")["clock"]
        wait_for(lambda: scripts.metrics("one")["clock"] >= begun + 40, 3 * PATIENCE_S, "40 rounds")
        (tmp_path / "stop").touch()
        results = [scripts.results(name)[0] for name in NAMES]
        assert len({result["digest"] for result in results}) == 1
        records = RecordStore(Home(tmp_path / "one").ledger_path, scripts.swarm_id, read_only=True)
        deltas = [d for d in records.load(scripts.described.plan()) if begun < d.round <= begun + 40]
        records.close()
        assert all(is_drawn(delta.author, delta.round, delta.body.turn) for delta in deltas)
        assert {delta.body.turn for delta in deltas} != {EVERY_ROUND}
        assert len({delta.author for delta in deltas}) == len(NAMES), "everybody has its turn"
        by_round = Counter(delta.round for delta in deltas)
        assert 1.2 <= len(deltas) / 40 <= 3.0, by_round
