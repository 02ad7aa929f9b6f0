"""A new core for a folder, which has handled no events yet."""

from __future__ import annotations

import random

from gossamer.node.home import Home
from gossamer.protocol.membership.members import NodeInfo
from gossamer.protocol.replica import Replica
from tests.protocol import builders


def new_core(home: Home) -> Replica:
    home.create()
    home.ledger_path.touch()
    return Replica(
        identity=builders.identity(0),
        manifest=builders.SMALL,
        info=NodeInfo(name="n", trains=False, incarnation=1),
        fits=lambda blob, size: None,
        unix_offset_s=builders.CREATED,
        rng=random.Random(0),
    )
