"""Phi on its way to a model on a GPU.

A GPU copies a fragment by itself, out of shared memory that is pinned for it, into room that is kept there;
the model takes it over from that room. What comes next is sent ahead, on a stream of its own: neither the
loop nor the GPU's other work waits for it.

A model on the CPU, on devices of another kind, or with a fragment on several of them, takes it from shared
memory as it is.
"""

import logging
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from gossamer.node.ipc.daemon_link import Offer
from gossamer.node.ipc.shared import SharedMemory
from gossamer.node.training.fragmentstate import FragmentState
from gossamer.node.training.interrupts import held_back

PORTABLE = 1
"""Pinned for all GPUs."""

log = logging.getLogger("gossamer.peer")


class Staging:
    """Where each offered fragment of Phi can be read, and whether all of it has been."""

    def __init__(self, fragments: Sequence[FragmentState]) -> None:
        self._fragments = fragments
        self._rooms: list[_Room | None] = [None] * len(fragments)
        self._pinned: SharedMemory | None = None
        """The memory that was seen last."""
        kept: dict[torch.device, _Room] = {}
        # From the largest on, so that its room is enough for all.
        for state in sorted(fragments, key=lambda state: -state.fragment.numel):
            if (gpu := state.gpu) is not None:
                if gpu not in kept:
                    kept[gpu] = _Room(gpu, state.fragment.numel)
                self._rooms[state.fragment.index] = kept[gpu]

    def send_ahead(self, offer: Offer) -> None:
        """Begin to copy the one that will be taken over next, unless another one was sent before it."""
        room = self._rooms[offer.fragment]
        if room is not None and room.is_free:
            with held_back():  # or a script's stream might be another one afterwards
                room.send_ahead(offer, self._source(offer))

    def has_come(self, offer: Offer) -> bool:
        """Whether to take it over would hold nothing up."""
        room = self._rooms[offer.fragment]
        return room is None or room.has_come(offer)

    def values(self, offer: Offer) -> Tensor:
        """An offered fragment's values, int32[fragment.numel], to be read before `leave`."""
        room = self._rooms[offer.fragment]
        return self._source(offer) if room is None else room.values(offer, self._source(offer))

    def leave(self, offer: Offer) -> None:
        """An offer was taken over, or never will be."""
        if (room := self._rooms[offer.fragment]) is not None:
            room.leave(offer)

    def is_read(self, offer: Offer) -> bool:
        """Whether nothing copies it any more from the memory that it was offered in."""
        room = self._rooms[offer.fragment]
        return room is None or room.is_read(offer)

    def close(self) -> None:
        """Wait for all copies: the memory may go then."""
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
        """What was sent ahead, and has not been left."""
        self._left = torch.cuda.Event()
        """Behind all that has read what was here before."""
        self._copied: dict[Offer, torch.cuda.Event] = {}
        """The ends of copies, until they are known to be over."""
        # What was in this memory before may still be in use there, and this may be when the memory goes.
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
            with torch.cuda.stream(stream):  # of this device, which need not be the current one
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
        with suppress(RuntimeError):  # of a GPU that has failed, which has ended training
            for event in self._copied.values():
                event.synchronize()

    def pin(self, shared: SharedMemory) -> None:
        """Have GPUs copy out of a mapping, and into it, by themselves."""
        whole = torch.frombuffer(shared.whole, dtype=torch.uint8)
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self._device):  # no other needs a context for that
            failure = int(runtime.cudaHostRegister(whole.data_ptr(), whole.numel(), PORTABLE))
        if not failure:
            # Before the mapping goes, which lives for as long as this and as any view of it.
            weakref.finalize(shared, runtime.cudaHostUnregister, whole.data_ptr()).atexit = False
            return
        log.info(
            "training waits for what is copied to and from the GPU: no memory can be pinned (CUDA error %d)",
            failure,
        )
        with suppress(RuntimeError):  # CUDA says it once more, to whoever asks the GPU for something next
            torch.zeros(1, device=self._device)

    def _copy(self, offer: Offer, source: Tensor) -> None:
        """In the current stream. Where the source is not pinned, it is copied before this returns."""
        self._memory[: source.numel()].copy_(source, non_blocking=True)
        self._copied[offer] = torch.cuda.Event()
        self._copied[offer].record()
