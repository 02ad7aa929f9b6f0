"""The list of benchmarks, in the order of docs/benchmarks.md."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Section:
    """A section of docs/benchmarks.md; its text is in docs/benchmarks/`name`.md."""

    name: str
    title: str
    benchmarks: Sequence[Benchmark]


SECTIONS = (
    Section(
        "waiting",
        "The training loop never waits",
        (Benchmark("waiting", "benchmarks.waiting", 9.0), Benchmark("gpu", "benchmarks.gpu", 4.0)),
    ),
    Section(
        "codecs",
        "Codecs and merging on one core",
        (
            Benchmark("codecs", "benchmarks.codecs", 0.5, usual=True),
            Benchmark("merging", "benchmarks.merging", 1.0, usual=True),
        ),
    ),
    Section("learning", "Learning at equal tokens", (Benchmark("learning", "benchmarks.learning", 155.0),)),
    Section(
        "goodput", "Goodput under failures", (Benchmark("goodput", "benchmarks.goodput", 1.5, usual=True),)
    ),
    Section(
        "scale",
        "Scale",
        (
            Benchmark("members", "benchmarks.members", 2.5),
            Benchmark("parameters", "benchmarks.parameters", 1.0),
            Benchmark("footprint", "benchmarks.footprint", 6.0),
        ),
    ),
    Section(
        "links",
        "Links and floods",
        (
            Benchmark("transport", "benchmarks.transport", 0.2, usual=True),
            Benchmark("flood", "benchmarks.flood", 2.5),
        ),
    ),
    Section(
        "network",
        "Spreading, joining and slow lines",
        (
            Benchmark("spread", "benchmarks.spread", 6.0),
            Benchmark("joining", "benchmarks.joining", 6.5),
            Benchmark("lines", "benchmarks.lines", 9.0),
        ),
    ),
)

OTHERS = (Benchmark("attacks", "benchmarks.attacks", 20.0),)
"""Benchmarks with a document of their own: docs/attacks.md."""


def benchmarks() -> Iterator[Benchmark]:
    """All benchmarks."""
    for section in SECTIONS:
        yield from section.benchmarks
    yield from OTHERS
