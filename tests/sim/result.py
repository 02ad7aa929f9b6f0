"""What came of simulating one seed, in a form that travels between processes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of one seed."""

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
    """Each storm, and how long convergence took after it."""
    control_bytes_per_s: float
    """Of an average node, sent."""
    wakes_per_s: float
    """Of the busiest node in its busiest seconds."""
    damaged_refused: int
