"""What a trainer tells its daemon about itself, for peers and displays: twice a second at most."""

import time
from dataclasses import dataclass
from typing import Protocol

from gossamer.node.ipc.messages import JOINING, Report

INTERVAL_S = 0.5
RATE_OVER_S = 2.0
"""Tokens per second are measured over this long."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far this node has come over all its runs."""

    steps: int = 0
    """Inner steps, which is also the number of batches drawn."""
    tokens: int = 0


class Reporting(Protocol):
    """A peer, as far as a `Reporter` needs one."""

    @property
    def progress(self) -> Progress: ...

    @property
    def last_loss(self) -> float: ...

    @property
    def wait_fraction(self) -> float: ...

    def report(self, report: Report) -> None: ...


class Reporter:
    """Sends a peer's reports, at least `INTERVAL_S` apart."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._reported_at = 0.0
        self._recent: tuple[float, int] | None = None
        """When the speed was last measured, and the tokens at that time; None before training begins."""
        self._tokens_per_s = 0.0

    def report(
        self,
        peer: Reporting,
        state: str,
        *,
        val_loss: float | None = None,
        val_loss_start: float | None = None,
        evaluated_version: int = -1,
        evaluated_round: int = 0,
    ) -> None:
        """Tell the daemon, if it is time to."""
        now = time.monotonic()
        if now - self._reported_at < INTERVAL_S:
            return
        self._reported_at = now
        if state != JOINING:
            self._measure(now, peer.progress.tokens)
        peer.report(
            Report(
                state=state,
                inner_steps=peer.progress.steps,
                tokens=peer.progress.tokens,
                tokens_per_s=self._tokens_per_s,
                loss=peer.last_loss,
                val_loss=val_loss,
                val_loss_start=val_loss_start,
                evaluated_version=evaluated_version,
                evaluated_round=evaluated_round,
                wait_fraction=peer.wait_fraction,
                device=self._device,
            )
        )

    def _measure(self, now: float, so_far: int) -> None:
        """Measure the speed of this run. The first call only sets the start: `so_far` includes earlier
        runs."""
        since, tokens = self._recent or (now, so_far)
        if now - since > RATE_OVER_S:
            self._tokens_per_s = (so_far - tokens) / (now - since)
            since, tokens = now, so_far
        self._recent = since, tokens
