"""`gossamer.protocol.unix_time`: a moment in words."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gossamer.protocol.unix_time import moment, span


@given(st.integers(0, 253_402_300_799))
@example(951_782_399)  # the last second before a leap day of the year 2000
@example(951_782_400)
@example(4_107_542_400)  # 2100 has none
def test_a_moment_is_what_the_calendar_says(unix_s):
    assert moment(unix_s) == f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M} UTC"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 s"),
        (40.4, "40 s"),
        (60, "1 min"),
        (720, "12 min"),
        (19_800, "5.5 hours"),
        (86_400, "1.0 days"),
        (172_800, "2.0 days"),
    ],
)
def test_a_span_is_told_in_the_unit_that_fits(seconds, said):
    assert span(seconds) == said
