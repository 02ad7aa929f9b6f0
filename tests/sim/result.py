"""The outcome of simulating one seed, in a form that can be sent between processes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of one seed."""

    seed: int
    about: str
    failure: str | None
    trace: str
    """The trace's hash: equal for equal seeds."""
    cpu_s: float
    virtual_s: float
    events: int
    rounds: int
    deltas: int
    recoveries: tuple[tuple[str, float], ...]
    """Each storm, and the seconds that convergence took after it."""
    control_bytes_per_s: float
    """Bytes per second that an average node sends besides payloads."""
    wakes_per_s: float
    """Wakes per second of the busiest node in its busiest seconds."""
    damaged_refused: int
