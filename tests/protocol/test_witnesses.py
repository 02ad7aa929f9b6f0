"""What members attest, as far as it can be true."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace

from gossamer.protocol.claims import Claim, genesis_claim
from gossamer.protocol.history.forks import Witnesses
from gossamer.protocol.history.peer_claims import Witness
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.membership.members import Roster
from gossamer.protocol.records import MemberRecord
from tests.protocol import builders


def _witnesses(
    *rows: MemberRecord, genesis: Claim, ledger: Ledger, named: Collection[bytes] = ()
) -> list[Witness]:
    roster, links = Roster(b""), SimpleNamespace(given_ids=lambda: named)
    for row in rows:
        roster.update(row, 0.0)
    found = Witnesses(genesis, ledger, roster, links, SimpleNamespace()).witnesses()  # type: ignore[arg-type]
    return [next(witness for witness in found if witness.node_id == row.node_id) for row in rows]


def test_no_claim_of_another_beginning_than_the_manifests_counts() -> None:
    genesis, later = genesis_claim(bytes(32)), Claim(8, 1, bytes(32), b"\1" * 32)
    rows = [
        builders.row(builders.identity(1), claims=(later, genesis)),
        builders.row(builders.identity(2), claims=(later, genesis_claim(b"\2" * 32))),
        builders.row(builders.identity(3), claims=(genesis._replace(tokens=2**59),)),
    ]
    found = _witnesses(*rows, genesis=genesis, ledger=Ledger())
    assert [witness.claims for witness in found] == [(later, genesis), (later,), ()]


def test_who_was_named_and_who_has_published_is_told_apart() -> None:
    """A round that is merely said to be reached costs nothing to say."""
    rows = [builders.row(builders.identity(number), round=9) for number in range(3)]
    ledger = Ledger()
    ledger.note_last(rows[1].node_id, 3, bytes(32))
    found = _witnesses(*rows, genesis=genesis_claim(bytes(32)), ledger=ledger, named={rows[2].node_id})
    assert [(witness.is_named, witness.round) for witness in found] == [(False, 0), (False, 9), (True, 0)]
