"""What members say about the past, as far as it can be true."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

from gossamer.protocol.claims import Claim, genesis_claim
from gossamer.protocol.history.peer_claims import PeerClaim, PeerClaims
from gossamer.protocol.ledger import Ledger
from gossamer.protocol.membership.members import Health, Roster
from gossamer.protocol.records import MemberRecord
from tests.protocol import builders


def peers(*rows: MemberRecord, genesis: Claim, ledger: Ledger, named: Collection[bytes] = ()) -> PeerClaims:
    links = SimpleNamespace(given_ids=lambda: named)
    manifest = SimpleNamespace(genesis=SimpleNamespace(root=genesis.root))
    context: Any = SimpleNamespace(ledger=ledger, roster=Roster(b""), links=links, manifest=manifest)
    for row in rows:
        context.roster.update(row, 0.0)
    return PeerClaims(context, SimpleNamespace())  # type: ignore[arg-type]


def said(of: PeerClaims, *rows: MemberRecord) -> list[PeerClaim]:
    return [next(one for one in of.members() if one.node_id == row.node_id) for row in rows]


def test_no_claim_of_another_beginning_than_the_manifests_counts() -> None:
    genesis, later = genesis_claim(bytes(32)), Claim(8, 1, bytes(32), b"\1" * 32)
    rows = [
        builders.row(builders.identity(1), claims=(later, genesis)),
        builders.row(builders.identity(2), claims=(later, genesis_claim(b"\2" * 32))),
        builders.row(builders.identity(3), claims=(genesis._replace(tokens=2**59),)),
    ]
    found = said(peers(*rows, genesis=genesis, ledger=Ledger()), *rows)
    assert [one.claims for one in found] == [(later, genesis), (later,), ()]


def test_who_was_named_and_who_has_published_is_told_apart() -> None:
    """A round that is merely said to be reached costs nothing to say."""
    rows = [builders.row(builders.identity(number), round=9) for number in range(3)]
    ledger = Ledger()
    ledger.note_last(rows[1].node_id, 3, bytes(32))
    of = peers(*rows, genesis=genesis_claim(bytes(32)), ledger=ledger, named={rows[2].node_id})
    found = said(of, *rows)
    assert [(one.is_named, one.round) for one in found] == [(False, 0), (False, 9), (True, 0)]
    assert of.authors() == 1


def test_authors_that_are_gone_count_unless_they_have_left() -> None:
    """It may be we who are cut off from them, with a few others or with liars."""
    rows = [builders.row(builders.identity(number), leaving=number == 2) for number in range(3)]
    ledger = Ledger()
    for row in rows:
        ledger.note_last(row.node_id, 1, bytes(32))
    of = peers(*rows, genesis=genesis_claim(bytes(32)), ledger=ledger)
    of._roster.judge(rows[1].node_id, Health.DOWN, 1.0)
    assert of.authors() == 2
