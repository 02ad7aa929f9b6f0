"""Averaging rules: how the deltas of one tensor, one per author, become one step.

The manifest's layout names a rule for each tensor (`averaging`); each rule has its own file. All of them
reduce to integer coefficients and one float factor (see `base`).
"""

from gossamer.protocol.rules.base import Deltas, Rule
from gossamer.protocol.rules.centered_clip import centered_clip
from gossamer.protocol.rules.mean import weighted_mean
from gossamer.protocol.rules.rda import radial_directional

RULES: dict[str, Rule] = {
    "rda": radial_directional,
    "mean": weighted_mean,
    "centered-clip": centered_clip,
}

__all__ = ["RULES", "Deltas", "Rule"]
