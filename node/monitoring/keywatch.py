"""Whether another node has this one's key: a copy of its folder runs, or a copy was put back."""

import math

from gossamer.node.monitoring.look import Look
from gossamer.node.seldom import SeldomWarnings

KEY_S = 600.0
"""For how long after the last sign that another node has our key this node counts as unhealthy."""

OUTDONE_MAX = 2
"""After a clock was set back, our rows of before are newer than ours now: we outdo them, once or twice."""


class KeyWatch:
    """Looks for what another node has signed with our key."""

    def __init__(self, warnings: SeldomWarnings) -> None:
        self._warnings = warnings
        self._void = 0
        self._outdone = 0
        self._signed_elsewhere = -math.inf
        """When there was last a sign that another node has our key."""

    def look(self, look: Look) -> str | None:
        """The problem that this is; None if there was no sign of it lately."""
        if look.void > self._void:
            self._signed_elsewhere = look.now
            self._warnings.say(
                "key",
                look.now,
                "what this node publishes is void: its key signs other deltas for the same rounds elsewhere,"
                " in a copy of its folder, or did so before an old copy was restored. Stop all but one; to"
                " make a copy a node of its own, remove the file key from it",
            )
        elif look.outdone > max(self._outdone, OUTDONE_MAX):
            self._signed_elsewhere = look.now
            self._warnings.say(
                "twin",
                look.now,
                "another node runs with this one's key, in a copy of its folder: each cuts the other's links,"
                " and what both publish for a round is void. Stop all but one; to make a copy a node of its"
                " own, remove the file key from it",
            )
        self._void, self._outdone = look.void, look.outdone
        if look.now - self._signed_elsewhere > KEY_S:
            return None
        return (
            "its key also signs elsewhere, or did before its folder was restored: what it publishes is void"
        )
