"""`gossamer.node.daemon.monitoring.events`: who holds the same model, whoever has sealed what by now."""

from __future__ import annotations

from gossamer.node.daemon.monitoring.events import Comparison, Likeness, compare, summary
from gossamer.protocol.claims import Claim

GENESIS = Claim(0, 0, bytes(32), b"g" * 32)


def claim(round_: int, *, records: bytes = b"r", model: bytes = b"m") -> Claim:
    return Claim(round_, 100 * round_, records * 32, model * 32)


def test_replicas_are_compared_at_the_newest_round_that_both_have():
    ours = (claim(48), claim(32), claim(16))
    assert compare(ours, (claim(64), claim(48), claim(32))) == (48, Likeness.SAME)
    assert compare(ours, (claim(32, model=b"x"), claim(16))) == (32, Likeness.OTHER)
    assert compare((GENESIS,), (GENESIS,)) == (0, Likeness.SAME)


def test_other_records_are_not_yet_another_model():
    late = claim(16, records=b"l", model=b"x")
    assert compare((claim(16),), (late,)) == (16, Likeness.RECORDS)


def test_without_a_round_in_common_nothing_is_said():
    assert compare((), (claim(16),)) is None
    assert compare((claim(16),), ()) is None
    assert compare((claim(16),), (claim(32), GENESIS)) is None


def test_the_sum_of_it():
    ours = (claim(48), claim(32))
    same, differs = Comparison(48, Likeness.SAME), Comparison(32, Likeness.OTHER)
    digest = (b"m" * 32).hex()
    found = summary(ours, [same, None, differs, same])
    assert found == {"same": 2, "of": 3, "rounds": [32, 48], "digest": digest}
    assert summary(ours, [None]) == {"same": 0, "of": 0, "rounds": None, "digest": None}
    assert summary((), []) == {"same": 0, "of": 0, "rounds": None, "digest": None}
