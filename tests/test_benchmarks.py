"""Every benchmark runs to its end on small sizes; none asserts a time."""

import pytest

from benchmarks import attacks, codecs, merging


@pytest.mark.parametrize("benchmark", [attacks, codecs, merging])
def test_quick_run_gives_figures(benchmark, capsys):
    rows = benchmark.run(quick=True)
    assert rows
    assert all(value > 0 for row in rows for key, value in row.items() if key.endswith("_per_s"))
    assert capsys.readouterr().out.strip()
