"""`watching`: what a look at a running daemon finds."""

from __future__ import annotations

from pathlib import Path

from gossamer.protocol.membership.roster import Health
from tests.node.daemons import founded, running
from tests.protocol import builders


async def test_a_founder_that_is_alone_knows_whom_it_dials(tmp_path: Path) -> None:
    """It was given nobody to join, and whom it met is down for it as soon as its network is gone."""
    async with running(founded(tmp_path / "a")) as daemon:
        assert daemon.watching._look(0.0).known == 0
        members = [builders.identity(number) for number in (1, 2, 3)]
        for number, member in enumerate(members):
            row = builders.row(member, addresses=(f"10.0.0.{number}:7700",))
            daemon.core.roster.update(row, 0.0)
        daemon.core.roster.judge(members[0].node_id, Health.DOWN, 1.0)
        daemon.core.roster.judge(members[1].node_id, Health.LEFT, 1.0)
        assert daemon.watching._look(0.0).known == 2, "nobody dials who has left"
