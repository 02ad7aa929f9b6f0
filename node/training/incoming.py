"""Which of the daemon's offers of Phi a step takes over: no outdated ones, and not all at once."""

from collections.abc import Sequence

from torch import Tensor

from gossamer.node.ipc.daemon_link import DaemonLink, Offer
from gossamer.node.training.fragmentstate import FragmentState
from gossamer.node.training.interrupts import held_back
from gossamer.node.training.staging import Staging


class Incoming:
    """Offers that have come. Each waits here until it is taken over, even if an error comes in between."""

    def __init__(self, link: DaemonLink, fragments: Sequence[FragmentState], staging: Staging) -> None:
        self._link = link
        self._fragments = fragments
        self._staging = staging
        self._waiting: list[Offer] = []
        self._done_with: list[Offer] = []
        """Taken over or outdated, but perhaps still being read."""
        self._passed_over = 0
        """How many of the first in `_waiting` were passed over by a step that published another fragment."""

    def take(self) -> list[Offer]:
        """All offers that wait."""
        self._passed_over = 0
        self._collect()
        self._give_back()
        return list(self._waiting)

    def take_for_step(self, round_: int | None) -> list[Offer]:
        """The offers to apply at a step, which publishes `round_` if that is given: few enough not to hold it
        up.

        A step that publishes passes over the offers of other fragments, but only once. Any other step takes
        the ones passed over, or half of all, once the first has reached the device where it is taken over.
        """
        self._collect()
        self._give_back()
        if not self._waiting:
            self._passed_over = 0
            return []
        self._staging.send_ahead(self._waiting[0])
        count = self._passed_over
        if round_ is None:
            if not self._staging.has_come(self._waiting[0]):
                return []
            count = max(count, -(-len(self._waiting) // 2))
            self._passed_over = 0
        else:
            fragment = round_ % len(self._fragments)
            last = max((i for i, offer in enumerate(self._waiting) if offer.fragment == fragment), default=-1)
            count = max(count, last + 1)
            self._passed_over = len(self._waiting) - count
        return self._newer(self._waiting[:count])

    def values(self, offer: Offer) -> Tensor:
        """What to take over, int32[fragment.numel]."""
        return self._staging.values(offer)

    def took(self, offer: Offer) -> None:
        """Note that an offer is taken over, or outdated."""
        with held_back():  # cut short, the daemon would wait for ever to hear of it
            self._waiting.remove(offer)
            self._staging.leave(offer)
            self._done_with.append(offer)
            self._give_back()

    def close(self) -> None:
        """Wait until no offer is being read any more."""
        self._staging.close()

    def _give_back(self) -> None:
        """Return the memory of all offers that nothing reads any more to the daemon."""
        for offer in [offer for offer in self._done_with if self._staging.is_read(offer)]:
            with held_back():
                self._done_with.remove(offer)
                self._link.took(offer)

    def _collect(self) -> None:
        if not self._link.has_offers:
            return
        with held_back():
            while (offer := self._link.take_offer()) is not None:
                self._waiting.append(offer)

    def _newer(self, offers: Sequence[Offer]) -> list[Offer]:
        """The offers that include our own last delta. An older one would undo that delta for a moment."""
        newer = []
        for offer in offers:
            if offer.own_round >= self._fragments[offer.fragment].last_published:
                newer.append(offer)
            else:
                self.took(offer)
        return newer
