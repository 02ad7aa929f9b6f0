"""`rest`: a swarm rests when no member has gone on for a while."""

from __future__ import annotations

from gossamer.protocol.limits import REST_S
from gossamer.protocol.rest import Rest


def test_a_swarm_rests_once_nobody_has_gone_on_for_long_enough() -> None:
    rest = Rest()
    assert not rest.lasts(1e9), "nobody has looked yet"
    rest.look({b"a": 5, b"b": 7}, 3, 0.0)
    rest.look({b"a": 5, b"b": 7}, 3, REST_S - 0.1)
    assert not rest.lasts(REST_S - 0.1) and rest.lasts(REST_S)
    assert not rest.somebody_trains


def test_an_inner_step_a_newer_clock_and_a_newcomer_begin_it_anew() -> None:
    for steps, clock, trains in (({b"a": 6}, 3, True), ({b"a": 5}, 4, True), ({b"a": 5, b"c": 9}, 3, False)):
        rest = Rest()
        rest.look({b"a": 5}, 3, 0.0)
        rest.look(steps, clock, 5.0)
        assert not rest.lasts(REST_S) and rest.lasts(5.0 + REST_S)
        assert rest.somebody_trains is trains, "of a newcomer nobody knows yet"


def test_who_goes_and_who_starts_afresh_changes_nothing() -> None:
    rest = Rest()
    rest.look({b"a": 5, b"b": 7}, 3, 0.0)
    rest.look({b"a": 0}, 2, 5.0)
    assert rest.lasts(REST_S) and not rest.somebody_trains
