"""Whether the trainer is there, stays, and takes steps."""

import logging
import math
from collections import deque

from gossamer.node.monitoring.look import Look

TRAINER_S = 120.0
STANDSTILL_S = 900.0
"""How late a trainer's next step must be before it is reported: it may evaluate, or compile its first
step."""

STARTS_MAX, STARTS_S = 5, 600.0
"""A trainer that was started this often within ten minutes ends again and again, until one stays."""

log = logging.getLogger("gossamer.vitals")


class TrainerWatch:
    """Watches a node's trainers, one after another."""

    def __init__(self) -> None:
        self._seen = math.inf
        """When there was last a trainer, or at first, when we first looked."""
        self._starts: deque[float] = deque(maxlen=STARTS_MAX)
        """When the last trainers came."""
        self._started = 0
        self._told_standstill = False

    def look(self, look: Look) -> None:
        """Note who has come and gone."""
        if look.starts > self._started:
            self._started, self._told_standstill = look.starts, False
            self._starts.append(look.now)
        if not look.lacks_trainer or self._seen == math.inf:
            self._seen = look.now

    def problem(self, look: Look) -> str | None:
        """What is wrong with the trainer; None if nothing is."""
        if look.now - self._seen > TRAINER_S:
            return f"there has been no trainer for {TRAINER_S:.0f} s"
        are_many = len(self._starts) == STARTS_MAX and look.now - self._starts[0] < STARTS_S
        if are_many and look.now - self._starts[-1] < TRAINER_S:
            within = f"{STARTS_S / 60:.0f} minutes"
            return f"the trainer keeps ending: it was started {STARTS_MAX} times within {within}"
        if look.overdue_s <= STANDSTILL_S:
            return None
        found = f"the trainer has not taken a step for {STANDSTILL_S / 60:.0f} minutes: is it stuck?"
        if not self._told_standstill:  # once per trainer: a notebook may rest for long, again and again
            log.warning("%s", found)
        self._told_standstill = True
        return found
