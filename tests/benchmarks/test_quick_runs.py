"""Every benchmark runs to its end on small sizes; its figures can be kept and shown; no times asserted."""

import json

import pytest

from benchmarks import catalogue

SLOW = {
    "adaptive",
    "attacks",
    "flood",
    "footprint",
    "goodput",
    "joining",
    "learning",
    "lines",
    "members",
    "parameters",
    "peers",
    "spread",
    "waiting",
}
"""Those that take more than some 3 s."""

BENCHMARKS = [
    pytest.param(benchmark, id=benchmark.name, marks=[pytest.mark.slow] if benchmark.name in SLOW else [])
    for benchmark in catalogue.benchmarks()
]


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_a_quick_run_gives_figures(benchmark, tmp_path, capsys):
    module = benchmark.load()
    if (reason := getattr(module, "why_not", lambda: None)()) is not None:
        pytest.skip(reason)
    figures = json.loads(json.dumps(module.run(quick=True), allow_nan=False))
    assert figures
    if hasattr(module, "tables"):
        for table in module.tables(figures):
            assert table.rows and all(len(row) == len(table.columns) for row in table.rows), table.title
            table.show()
    assert capsys.readouterr().out.strip(), "something to see"
    for goal in getattr(module, "GOALS", ()):
        assert goal.measured_text(figures) and goal.bound_text()
    if hasattr(module, "plot"):
        module.plot(figures, tmp_path)
        drawn = {path.name: path.read_bytes() for path in tmp_path.glob("*")}
        assert drawn and all(name.startswith(benchmark.name) and name.endswith(".svg") for name in drawn)
        module.plot(figures, tmp_path)
        assert drawn == {path.name: path.read_bytes() for path in tmp_path.glob("*")}, "the same bytes again"
