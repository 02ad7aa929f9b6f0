"""All fuzz targets, and runs of a share of their inputs in one process, which watch time and memory."""

from __future__ import annotations

import faulthandler
import resource
import signal
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import FrameType

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.decoders import DECODERS
from tests.fuzz.siege import SIEGE
from tests.fuzz.stores import ADMITTANCE, STORES
from tests.fuzz.target import Depth, Target

TARGETS: dict[str, Target] = {target.name: target for target in (*DECODERS, *ADMITTANCE, SIEGE, *STORES)}

CHANGES_MAX = 6

SECONDS_MAX = 20.0
"""Limit for one input. On an idle machine the slowest takes under 1 s; a busy machine must not fail."""

MEMORY_MIB = 64
"""How much one input may raise the process's peak memory."""

STUCK_S = 900.0
KEPT = Path(".hypothesis/fuzz")
"""Where inputs that failed are kept."""


@dataclass(frozen=True)
class Job:
    name: str
    seed: int
    inputs: int
    giants: bool


@dataclass
class Outcome:
    """The results of a job, or of all jobs of a target."""

    depths: Counter[Depth] = field(default_factory=Counter)
    seconds: float = 0.0
    slowest_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        self.depths += other.depths
        self.seconds += other.seconds
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        self.failures += other.failures

    @property
    def inputs(self) -> int:
        return self.depths.total()


class TooSlowError(Exception):
    """An input took longer than SECONDS_MAX."""


def _alarm(_signal: int, _frame: FrameType | None) -> None:
    raise TooSlowError(f"an input took over {SECONDS_MAX} s")


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Feeder:
    """Feeds one target, watching time and memory."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.outcome = Outcome()
        self.failed: bytes | None = None

    def feed(self, data: bytes) -> None:
        before, begun = _peak_mib(), time.perf_counter()
        signal.setitimer(signal.ITIMER_REAL, SECONDS_MAX)
        try:
            self.outcome.depths[self.target.feed(data)] += 1
            grown = _peak_mib() - before
            assert grown <= MEMORY_MIB, f"an input took {grown:.0f} MiB"
        except BaseException:
            self.failed = data
            raise
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        self.outcome.slowest_s = max(self.outcome.slowest_s, time.perf_counter() - begun)


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


def run(job: Job) -> Outcome:
    """Run one job in this process."""
    target = TARGETS[job.name]
    signal.signal(signal.SIGALRM, _alarm)
    faulthandler.dump_traceback_later(STUCK_S, exit=True)
    feeder = Feeder(target)
    begun = time.perf_counter()

    @seed(job.seed)
    @settings(
        max_examples=job.inputs,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
    )
    @given(inputs(target))
    def generated(data: bytes) -> None:
        feeder.feed(data)

    try:
        for data in target.giants() if job.giants else ():
            feeder.feed(data)
        generated()
    except Exception:  # any exception is what we look for
        feeder.outcome.failures.append(_report(job.name, feeder.failed or b""))
    faulthandler.cancel_dump_traceback_later()
    feeder.outcome.seconds = time.perf_counter() - begun
    return feeder.outcome


def _report(name: str, data: bytes) -> str:
    """Keep an input that failed; returns how to feed it again."""
    KEPT.mkdir(parents=True, exist_ok=True)
    path = KEPT / f"{name}-{sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    shown = repr(data) if len(data) <= 300 else f"{data[:300]!r}... ({len(data)} bytes)"
    return (
        f"FAILED {name}: {shown}\n{traceback.format_exc(limit=-6)}"
        f"  replay: python -m tests.fuzz --targets {name} --input {path}"
    )


def replay(name: str, data: bytes) -> Depth:
    """Feed one input. Raises what the target raises."""
    signal.signal(signal.SIGALRM, _alarm)
    feeder = Feeder(TARGETS[name])
    feeder.feed(data)
    return next(iter(feeder.outcome.depths))
