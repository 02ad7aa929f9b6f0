"""What new manifests have where nobody says otherwise."""

AMONG_FRIENDS = {"weight_cap": 0.0}
"""For invited members: their machines may differ a thousandfold, and each should count for what it does."""

AMONG_STRANGERS = {"clip": 1.5}
"""For open swarms: half of a manifest's default. It costs nothing in a calm swarm, and two of eight members
that send their deltas with the opposite sign no longer stop it (docs/attacks.md)."""

EVERY_STEPS = 30
"""Default number of inner steps in a window."""

FRAGMENTS = 4
"""Default number of parts that a model is split into. They take turns, so that no delta moves the whole model
at once: 1 % less loss for the same bytes (docs/benchmarks/learning.md)."""

RETAIN = 256
"""Default number of windows whose records are kept; `history.retain` is this times the fragments, in
rounds."""


def outer_defaults(codec: str, *, by_mean: bool = False) -> dict[str, float]:
    """Outer optimizer settings that suit a codec; docs/benchmarks/learning.md has the evidence.

    Momentum only pays from 4 bits up. topk sends so little of a delta that longer steps make up for it,
    provided that what was left out is forgotten sooner.

    The mean of deltas that differ is shorter than each of them. `rda` makes up for that; if all tensors are
    averaged `by_mean`, the steps are longer instead, and then tolerate less momentum.
    """
    if codec == "topk":
        return {"learning_rate": 4.5 if by_mean else 3.0, "momentum": 0.0, "ef_decay": 0.8}
    if codec == "int2":
        return {"learning_rate": 1.4 if by_mean else 1.0, "momentum": 0.0, "ef_decay": 0.9}
    if by_mean:
        return {"learning_rate": 0.7, "momentum": 0.5, "ef_decay": 1.0}
    return {"learning_rate": 0.5, "momentum": 0.7, "ef_decay": 1.0}
