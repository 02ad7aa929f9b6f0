"""What a daemon tells its trainer of the data, from the records that are here."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gossamer.node.daemon.phi import data_view
from gossamer.node.daemon.phi.data_view import DataView
from gossamer.node.daemon.storage.records import GENESIS, Base
from gossamer.node.ipc import messages as control
from gossamer.protocol.blocks import pack_blocks
from gossamer.protocol.history.data_claims import DataClaims, Taken
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.records import Delta
from tests.protocol.builders import body_of, identity, manifest, signed

BLOCKS = 64
OURS = manifest(data={"samples": 640, "blocks": BLOCKS})
CAP = OURS.outer.weight_cap


def delta(author: int, round_: int, epoch: int, *blocks: int) -> Delta:
    return signed(
        identity(author), body_of(b"1", "int8", round_, 2, epoch=epoch, blocks=pack_blocks(blocks)[0]), OURS
    )


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(data_view, "LOOK_S", 0.0)
    monkeypatch.setattr(data_view, "REST", 0)
    found = SimpleNamespace(sent=[], ledger=Ledger())
    core = SimpleNamespace(manifest=OURS, ledger=found.ledger, layout=OURS.plan(), turn=64)
    core.identity = identity(0)
    found.loop = SimpleNamespace(base=GENESIS, begun=1)
    found.port = SimpleNamespace(attached=True, attachments=1, send=found.sent.append)
    found.view = DataView(core, found.loop, found.port)  # type: ignore[arg-type]
    return found


def hear(parts: Any, *deltas: Delta) -> None:
    for each in deltas:
        parts.ledger.add(each)
        parts.view.changed(each.round)


def test_a_trainer_is_told_what_is_taken_when_it_comes_and_when_that_changes(parts: Any) -> None:
    hear(parts, delta(1, 1, 0, 3, 4))
    parts.view.tell()
    parts.view.tell()
    (message,) = parts.sent
    assert isinstance(message, control.Data)
    assert np.flatnonzero(Taken.unpack(message.taken, BLOCKS).now).tolist() == [3, 4, 5, 6]
    parts.port.attachments = 2
    parts.view.tell()
    assert parts.sent == [message] * 2
    hear(parts, delta(1, 2, 0, 5))
    parts.view.tell()
    assert len(parts.sent) == 3


def test_it_is_the_fold_of_all_that_is_here_however_it_came(parts: Any) -> None:
    rng = random.Random(1)
    held = {
        round_: [delta(author, round_, round_ // 30, rng.randrange(BLOCKS)) for author in (1, 2, 3)]
        for round_ in range(1, 80)
    }
    late = [each for round_ in (7, 60) for each in held[round_]]
    for deltas in held.values():
        hear(parts, *(each for each in deltas if each not in late))
        parts.view.look()
    hear(parts, *late)
    parts.view.look()
    whole = DataClaims(BLOCKS).as_of(80, 0, held, CAP)
    assert parts.view.claims.pack() == whole.pack()
    base = Base(40, bytes(32), 0, DataClaims(BLOCKS).as_of(40, 0, held, CAP).pack())
    assert OURS.pace.every_steps, "so that the folds are those of the data alone"
    parts.ledger.close(40)
    hear(parts, delta(9, 80, 0, 1))
    parts.view.look()  # which waits while the base lags behind what is closed
    parts.loop.base = base
    parts.view.look()
    held[80] = [delta(9, 80, 0, 1)]
    assert parts.view.claims.pack() == DataClaims(BLOCKS).as_of(80, 0, held, CAP).pack()
