"""`gossamer.node.trainer.metrics`: what a trainer tells its daemon of itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from gossamer.node.ipc.messages import Report
from gossamer.node.trainer import metrics as reporting
from gossamer.node.trainer.metrics import INTERVAL_S, RATE_OVER_S, Progress, Reporter


@dataclass
class Training:
    """A peer that says how far it is, and keeps what it was to report."""

    progress: Progress
    last_loss: float = 2.0
    wait_fraction: float = 0.0
    reports: list[Report] = field(default_factory=list)

    def report(self, report: Report) -> None:
        self.reports.append(report)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock's time, to be set, in seconds."""
    now = [1000.0]
    monkeypatch.setattr(reporting.time, "monotonic", lambda: now[0])
    return now


def test_who_waits_for_the_swarm_does_not_know_yet_what_earlier_runs_did(clock: list[float]) -> None:
    reporter, peer = Reporter("cpu"), Training(Progress(0, 0))
    for second in range(40):
        clock[0] += INTERVAL_S
        if second == 20:
            peer.progress = Progress(10**6, 10**9)  # the checkpoint is taken up
        reporter.report(peer, "joining" if second < 20 else "training")
    assert len(peer.reports) == 40 and peer.reports[-1].tokens == 10**9
    assert {report.tokens_per_s for report in peer.reports} == {0.0}


@pytest.mark.parametrize("before", [0, 10**9])
def test_the_speed_is_of_this_run(clock: list[float], before: int) -> None:
    """Tokens are counted over all runs: a trainer that goes on has not made those in its first seconds."""
    reporter, peer = Reporter("cpu"), Training(Progress(before, before))
    clock[0] += 60.0  # the first step may take long
    for step in range(1, 21):
        clock[0] += INTERVAL_S
        peer.progress = Progress(before + step, before + 100 * step)
        reporter.report(peer, "training")
    speeds = [report.tokens_per_s for report in peer.reports]
    assert len(speeds) == 20 and peer.reports[-1].tokens == before + 2000
    unmeasured = int(RATE_OVER_S / INTERVAL_S) + 1
    assert set(speeds[:unmeasured]) == {0.0} and set(speeds[unmeasured:]) == {100 / INTERVAL_S}


def test_none_is_sent_too_soon_after_the_last(clock: list[float]) -> None:
    reporter, peer = Reporter("cpu"), Training(Progress(1, 1))
    for _ in range(10):
        reporter.report(peer, "training")
        clock[0] += INTERVAL_S / 2
    assert len(peer.reports) == 5
