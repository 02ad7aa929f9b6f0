"""A small share of the fuzzing, in every run of the tests; `make fuzz` does the rest."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from gossamer.protocol import limits
from gossamer.protocol.codecs import CODECS
from gossamer.protocol.messages import KINDS, decode
from gossamer.protocol.records import RecordKind
from gossamer.protocol.replica import Replica
from tests.fuzz.decoders import message_seeds, record_seeds
from tests.fuzz.runs import TARGETS, inputs
from tests.fuzz.siege import BOUNDS, TIGHT, Siege, bounds, tables
from tests.fuzz.target import Depth


@pytest.mark.parametrize("name", TARGETS)
def test_only_typed_errors(name: str) -> None:
    target = TARGETS[name]
    examples = max(5, int(settings().max_examples * min(1.0, target.share)))

    @settings(max_examples=examples, suppress_health_check=list(HealthCheck))
    @given(inputs(target))
    def feed(data: bytes) -> None:
        target.feed(data)

    feed()


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_reach_the_depths(name: str) -> None:
    """Otherwise all that is derived from them dies at the first check, and the fuzzing says nothing."""
    target = TARGETS[name]
    assert max(target.feed(seed) for seed in target.seeds[:50]) is Depth.ACCEPTED


@pytest.mark.parametrize("name", ["messages", "wire"])  # those of `manifest` take seconds: `make fuzz` does
def test_the_largest_inputs(name: str) -> None:
    for data in TARGETS[name].giants():
        TARGETS[name].feed(data)


def test_every_kind_has_seeds() -> None:
    assert {type(decode(seed)) for seed in message_seeds()} == set(KINDS)
    assert {seed[0] for seed in record_seeds()} == set(RecordKind)
    assert {f"payload-{name}" for name in CODECS} <= set(TARGETS)


def test_tables_and_limits_go_by_their_names() -> None:
    """A table that was renamed would no longer be checked."""
    core: Replica = Siege(0).core
    assert set(BOUNDS) <= {name for name, _ in tables(core)}
    with bounds(tight=True):
        assert {name: getattr(limits, name) for name in TIGHT} == TIGHT
    assert not TIGHT.items() & vars(limits).items(), "the real limits are back"
