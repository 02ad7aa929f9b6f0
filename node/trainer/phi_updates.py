"""Phi on its way to a model on a GPU.

A GPU copies a fragment by itself, from shared memory that is pinned for it, into GPU memory that is kept for
this; the model takes the fragment over from there. The next fragment is sent ahead on a separate stream, so
that neither the loop nor the GPU's other work waits for it.

A model on the CPU or on devices of another kind, or a fragment on several devices, reads shared memory
directly.
"""

import logging
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from gossamer.node.ipc.shared_memory import SharedMemory
from gossamer.node.trainer.daemon_link import DaemonLink, Offer
from gossamer.node.trainer.fragments import FragmentState
from gossamer.node.trainer.watchdogs import held_back

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all GPUs."""

log = logging.getLogger("gossamer.peer")


class Staging:
    """Where each offered fragment of Phi can be read, and whether all of it has been."""

    def __init__(self, fragments: Sequence[FragmentState]) -> None:
        self._fragments = fragments
        self._rooms: list[_Room | None] = [None] * len(fragments)
        self._pinned: SharedMemory | None = None
        """The shared memory that was pinned last."""
        kept: dict[torch.device, _Room] = {}
        # Largest first, so that its room is enough for all.
        for state in sorted(fragments, key=lambda state: -state.fragment.numel):
            if (gpu := state.gpu) is not None:
                if gpu not in kept:
                    kept[gpu] = _Room(gpu, state.fragment.numel)
                self._rooms[state.fragment.index] = kept[gpu]

    def send_ahead(self, offer: Offer) -> None:
        """Begin to copy the offer that will be taken over next, unless another was sent before it."""
        room = self._rooms[offer.fragment]
        if room is not None and room.is_free:
            with held_back():  # an interrupt could leave the script on another stream
                room.send_ahead(offer, self._source(offer))

    def has_come(self, offer: Offer) -> bool:
        """Whether an offer can be taken over without waiting."""
        room = self._rooms[offer.fragment]
        return room is None or room.has_come(offer)

    def values(self, offer: Offer) -> Tensor:
        """An offered fragment's values, int32[fragment.numel], to be read before `leave`."""
        room = self._rooms[offer.fragment]
        return self._source(offer) if room is None else room.values(offer, self._source(offer))

    def leave(self, offer: Offer) -> None:
        """Note that an offer was taken over, or never will be."""
        if (room := self._rooms[offer.fragment]) is not None:
            room.leave(offer)

    def is_read(self, offer: Offer) -> bool:
        """Whether nothing reads an offer's shared memory any more."""
        room = self._rooms[offer.fragment]
        return room is None or room.is_read(offer)

    def close(self) -> None:
        """Wait for all copies; afterwards the shared memory may be unmapped."""
        for room in {id(room): room for room in self._rooms if room is not None}.values():
            room.close()

    def _source(self, offer: Offer) -> Tensor:
        room = self._rooms[offer.fragment]
        if room is not None and offer.shared is not self._pinned:
            self._pinned = offer.shared
            room.pin(offer.shared)
        return torch.from_numpy(offer.values(self._fragments[offer.fragment].fragment))


class _Room:
    """Memory of one GPU, and what is in it."""

    def __init__(self, device: torch.device, numel: int) -> None:
        self._device = device
        self._memory = torch.empty(numel, dtype=torch.int32, device=device)
        self._beside = torch.cuda.Stream(device)
        self._ahead: Offer | None = None
        """The offer that was sent ahead, until it is left."""
        self._left = torch.cuda.Event()
        """Comes after all reads of the memory's previous content."""
        self._copied: dict[Offer, torch.cuda.Event] = {}
        """Marks the end of each copy that may still be under way."""
        # The allocator may give out memory that its previous owner's queued work still uses, and may do the
        # same with this memory once it is freed.
        self._left.record(torch.cuda.current_stream(device))
        self._memory.record_stream(self._beside)

    @property
    def is_free(self) -> bool:
        return self._ahead is None

    def send_ahead(self, offer: Offer, source: Tensor) -> None:
        self._beside.wait_event(self._left)
        with torch.cuda.stream(self._beside):
            self._copy(offer, source)
        self._ahead = offer

    def has_come(self, offer: Offer) -> bool:
        return offer is self._ahead and self.is_read(offer)

    def values(self, offer: Offer, source: Tensor) -> Tensor:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_stream(self._beside)
        if offer is not self._ahead:
            with torch.cuda.stream(stream):  # this device need not be the current one
                self._copy(offer, source)
        return self._memory[: source.numel()]

    def leave(self, offer: Offer) -> None:
        if offer is self._ahead:
            self._ahead = None
        self._left.record(torch.cuda.current_stream(self._device))

    def is_read(self, offer: Offer) -> bool:
        if offer in self._copied and self._copied[offer].query():
            del self._copied[offer]
        return offer not in self._copied

    def close(self) -> None:
        with suppress(RuntimeError):  # a GPU that has failed, which has ended training
            for event in self._copied.values():
                event.synchronize()

    def pin(self, shared: SharedMemory) -> None:
        """Pin a mapping, so that GPUs copy from and to it by themselves."""
        whole = torch.frombuffer(shared.whole, dtype=torch.uint8)
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self._device):  # no other device needs a context for this
            failure = int(runtime.cudaHostRegister(whole.data_ptr(), whole.numel(), PORTABLE))
        if not failure:
            # Unpin it before it is unmapped: the mapping lives as long as `shared` and any view of it.
            weakref.finalize(shared, runtime.cudaHostUnregister, whole.data_ptr()).atexit = False
            return
        log.info(
            "training waits for copies to and from the GPU: no memory can be pinned (CUDA error %d)",
            failure,
        )
        with suppress(RuntimeError):  # CUDA reports the failure once more, at the next call to the GPU
            torch.zeros(1, device=self._device)

    def _copy(self, offer: Offer, source: Tensor) -> None:
        """Copy in the current stream. If the source is not pinned, the copy is over when this returns."""
        self._memory[: source.numel()].copy_(source, non_blocking=True)
        self._copied[offer] = torch.cuda.Event()
        self._copied[offer].record()


# --- Which of the daemon's offers of Phi a step takes over: no outdated ones, and not all at once.


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
