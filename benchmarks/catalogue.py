"""The list of benchmarks, those recorded and the others."""

from importlib import import_module
from types import ModuleType
from typing import NamedTuple


class Benchmark(NamedTuple):
    """One benchmark module."""

    name: str
    module: str
    minutes: float
    """How long a full run takes on two cores."""
    usual: bool = False
    """Whether it runs without being named."""

    def load(self) -> ModuleType:
        """Import the module, only when it runs: some need torch, and some packages of the extras."""
        return import_module(self.module)


RECORDED = (
    Benchmark("waiting", "benchmarks.waiting", 9.0),
    Benchmark("gpu", "benchmarks.gpu", 4.0),
    Benchmark("codecs", "benchmarks.codecs", 0.5, usual=True),
    Benchmark("packing", "benchmarks.packing", 1.0, usual=True),
    Benchmark("merging", "benchmarks.merging", 1.0, usual=True),
    Benchmark("learning", "benchmarks.learning", 155.0),
    Benchmark("goodput", "benchmarks.goodput", 1.5, usual=True),
    Benchmark("members", "benchmarks.members", 15.0),
    Benchmark("cost", "benchmarks.cost", 3.0),
    Benchmark("parameters", "benchmarks.parameters", 1.0),
    Benchmark("footprint", "benchmarks.footprint", 6.0),
    Benchmark("transport", "benchmarks.transport", 0.2, usual=True),
    Benchmark("flood", "benchmarks.flood", 2.5),
    Benchmark("spread", "benchmarks.spread", 6.0),
    Benchmark("joining", "benchmarks.joining", 6.5),
    Benchmark("lines", "benchmarks.lines", 9.0),
    Benchmark("adaptive", "benchmarks.adaptive", 280.0),
    Benchmark("peers", "benchmarks.peers.matrix", 45.0),
)
"""Benchmarks whose figures are kept in docs/benchmarks/ and shown in docs/benchmarks.md, or a page there."""

OTHERS = (Benchmark("attacks", "benchmarks.attacks", 20.0),)
"""Benchmarks with a document of their own: docs/benchmarks.md."""


def benchmarks() -> tuple[Benchmark, ...]:
    """All benchmarks."""
    return RECORDED + OTHERS
