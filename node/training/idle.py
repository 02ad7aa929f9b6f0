"""Notices a loop that trains something else than the model that it has attached.

A copy of it, say, parameters that are handed from function to function, or a model that a notebook has made
anew: nothing is wrong with such a loop, and all that it publishes is nothing.
"""

import logging

TURNS = 10
"""Of all fragments, without a change, once there were some: a scaler that skips steps, or a rate that is 0
for a while, is no mistake."""

log = logging.getLogger("gossamer.peer")


class IdleWatch:
    """Says so, once, where no delta of any fragment has held anything since training began, or for long."""

    def __init__(self, fragments: int) -> None:
        self._unseen = set(range(fragments))
        """Fragments of which there was no delta yet."""
        self._patience = TURNS * fragments
        self._in_a_row = 0
        """Deltas without anything in them, since one has held something."""
        self._has_changed = self._has_told = False

    def look(self, fragment: int, changed: bool) -> None:
        """A fragment was published; whether its delta holds anything."""
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
                "no parameter has changed for %d rounds, so nothing is published any more: is this still the"
                " model that the optimizer trains, and its learning rate not 0?",
                self._in_a_row,
            )
        else:
            log.warning(
                "no parameter has changed since training began, so nothing was published: is this the model"
                " that the optimizer trains, and its learning rate not 0?"
            )
