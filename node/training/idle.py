"""Notices a loop that trains something else than the model that it has attached.

A copy of it, say, or parameters that are handed from function to function: nothing is wrong with such a loop,
and all that it publishes is nothing.
"""

import logging

log = logging.getLogger("gossamer.peer")


class IdleWatch:
    """Says so, once, where no delta of any fragment has held anything since training began."""

    def __init__(self, fragments: int) -> None:
        self._unseen = set(range(fragments))
        """Fragments of which there was no delta yet; none, once one has held anything."""

    def look(self, fragment: int, changed: bool) -> None:
        """A fragment was published; whether its delta holds anything."""
        if not self._unseen:
            return
        self._unseen = set() if changed else self._unseen - {fragment}
        if not changed and not self._unseen:
            log.warning(
                "no parameter has changed since training began, so nothing was published: is this the model"
                " that the optimizer trains, and its learning rate not 0?"
            )
