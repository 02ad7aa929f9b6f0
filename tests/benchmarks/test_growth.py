"""Where a cost bends."""

from benchmarks.growth import bend, bends

LINE = [{"n": n, "flat": 3.0, "linear": 5.0 * n, "square": 2.0 * n * n} for n in (4, 8, 16, 64)]


def test_what_grows_in_proportion_or_less_does_not_bend():
    assert bend(LINE, "n", "flat") is None and bend(LINE, "n", "linear") is None


def test_what_grows_faster_bends_where_it_does():
    assert bend(LINE, "n", "square") == 64
    assert bends(LINE, "n", {"linear": "bytes", "square": "memory"}) == "memory bends at 64"
    assert "nothing" in bends(LINE, "n", {"linear": "bytes"})
