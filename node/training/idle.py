"""Notices a loop that trains something other than the model that it has attached.

That may be a copy of the model, parameters that are passed from function to function, or a model that a
notebook has created again. Such a loop fails nowhere, and publishes nothing but zeros.
"""

import logging

TURNS = 10
"""How many times in a row all fragments may be published without a change, if there were changes before: a
scaler that skips steps, or a rate that is 0 for a while, is no mistake."""

log = logging.getLogger("gossamer.peer")


class IdleWatch:
    """Warns, once, if no fragment's delta has held anything since training began, or for a long time."""

    def __init__(self, fragments: int) -> None:
        self._unseen = set(range(fragments))
        """Fragments without a delta so far."""
        self._patience = TURNS * fragments
        self._in_a_row = 0
        """Empty deltas since the last one that held something."""
        self._has_changed = self._has_told = False

    def look(self, fragment: int, changed: bool) -> None:
        """A fragment was published; `changed` says whether its delta holds anything."""
        if changed:
            self._has_changed, self._in_a_row = True, 0
            return
        self._unseen.discard(fragment)
        self._in_a_row += 1
        is_long = self._in_a_row >= self._patience if self._has_changed else not self._unseen
        if not is_long or self._has_told:
            return
        self._has_told = True
        if self._has_changed:
            log.warning(
                "no parameter has changed for %d rounds, so nothing is published any more: does the"
                " optimizer still train this model, at a learning rate above 0?",
                self._in_a_row,
            )
        else:
            log.warning(
                "no parameter has changed since training began, so nothing was published: does the optimizer"
                " train this model, at a learning rate above 0?"
            )
