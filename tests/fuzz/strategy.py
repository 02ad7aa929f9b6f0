"""All fuzz targets, and Hypothesis strategies for their inputs."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.fuzz.admittance import ADMITTANCE
from tests.fuzz.decoders import DECODERS
from tests.fuzz.siege import SIEGE
from tests.fuzz.stores import STORES
from tests.fuzz.target import Target

TARGETS: dict[str, Target] = {target.name: target for target in (*DECODERS, *ADMITTANCE, SIEGE, *STORES)}

CHANGES_MAX = 6


def inputs(target: Target) -> st.SearchStrategy[bytes]:
    """Seeds with a few changes; one input in sixteen is random bytes. Shrinks towards an unchanged seed."""

    def choose(roll: int, choice: int, changes: list[int], noise: bytes) -> bytes:
        return noise if roll == 15 else target.derive(choice, changes)

    return st.builds(
        choose,
        st.integers(0, 15),
        st.integers(0, len(target.seeds) - 1),
        st.lists(st.integers(0, 2**32 - 1), max_size=CHANGES_MAX),
        st.binary(max_size=200),
    )
