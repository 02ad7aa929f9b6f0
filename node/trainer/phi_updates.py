"""Newer Phi on its way to the model: which of the daemon's offers a step applies, and how they reach a GPU.

A GPU copies a fragment by itself, from shared memory that is pinned for it, into GPU memory that is kept for
this; the model is moved from there. The next fragment is sent ahead on a separate stream, so that neither the
loop nor the GPU's other work waits for it. A model on the CPU or on devices of another kind, or a fragment on
several devices, reads shared memory directly.
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

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all GPUs."""

log = logging.getLogger("gossamer.peer")


class PhiUpdates:
    """The daemon's offers. Each waits here until it is applied, and until nothing reads its memory any
    more."""

    def __init__(self, link: DaemonLink, fragments: Sequence[FragmentState]) -> None:
        self._link = link
        self._fragments = fragments
        self._waiting: list[Offer] = []
        self._read: list[Offer] = []
        """Applied or outdated, but a GPU may still be copying from them."""
        self._rooms: dict[torch.device, Room] = {}
        self._pinned: SharedMemory | None = None
        """The shared memory that was pinned last."""
        # Largest first, so that its room is enough for all.
        for state in sorted(fragments, key=lambda state: -state.fragment.numel):
            if (gpu := state.gpu) is not None and gpu not in self._rooms:
                self._rooms[gpu] = Room(gpu, state.fragment.numel)

    def all(self) -> list[Offer]:
        """All offers that wait."""
        self._collect()
        return list(self._waiting)

    def for_step(self, round_: int | None) -> list[Offer]:
        """The offers to apply at a step, which publishes `round_` if that is given: few enough not to hold it
        up.

        That is the oldest offer, once it has reached the device where it is applied; and before a publish all
        up to the one of that fragment. Offers without our own last delta are dropped: they would undo it for
        a moment.
        """
        self._collect()
        if not self._waiting:
            return []
        first = self._waiting[0]
        room = self._room(first)
        if room is not None:
            room.send(first, self._source(first, room))
        due = None if round_ is None else round_ % len(self._fragments)
        count = 1 + max((i for i, offer in enumerate(self._waiting) if offer.fragment == due), default=-1)
        if count == 0 and (room is None or room.has_arrived(first)):
            count = 1
        offers = self._waiting[:count]
        newer = [offer for offer in offers if offer.own_round >= self._state(offer).last_published]
        for offer in offers:
            if offer not in newer:
                self.done(offer)
        return newer

    def values(self, offer: Offer) -> Tensor:
        """What to apply, int32[fragment.numel], to be read before `done`."""
        room = self._room(offer)
        source = self._source(offer, room)
        return source if room is None else room.values(offer, source)

    def done(self, offer: Offer) -> None:
        """An offer was applied, or is outdated."""
        self._waiting.remove(offer)
        if (room := self._room(offer)) is not None:
            room.leave(offer)
        self._read.append(offer)
        self._give_back()

    def forget(self) -> None:
        """Drop all offers: the daemon is about to make them again, in other memory."""
        self.close()
        for offer in self._waiting:
            if (room := self._room(offer)) is not None:
                room.leave(offer)
        self._waiting, self._read = [], []

    def close(self) -> None:
        """Wait until no offer is being read any more: the shared memory may then be unmapped."""
        for room in self._rooms.values():
            room.close()

    def _collect(self) -> None:
        if self._read:
            self._give_back()
        while (offer := self._link.take_offer()) is not None:
            self._waiting.append(offer)

    def _give_back(self) -> None:
        """Return the memory of all offers that nothing reads any more to the daemon."""
        for offer in list(self._read):
            room = self._room(offer)
            if room is None or room.is_read(offer):
                self._read.remove(offer)
                self._link.took(offer)

    def _state(self, offer: Offer) -> FragmentState:
        return self._fragments[offer.fragment]

    def _room(self, offer: Offer) -> "Room | None":
        gpu = self._state(offer).gpu if self._rooms else None
        return None if gpu is None else self._rooms[gpu]

    def _source(self, offer: Offer, room: "Room | None") -> Tensor:
        if room is not None and offer.shared is not self._pinned:
            self._pinned = offer.shared
            room.pin(offer.shared)
        return torch.from_numpy(offer.values(self._state(offer).fragment))


class Room:
    """Memory of one GPU for the largest fragment, and what is in it."""

    def __init__(self, device: torch.device, numel: int) -> None:
        self._device = device
        self._memory = torch.empty(numel, dtype=torch.int32, device=device)
        self._stream = torch.cuda.Stream(device)
        self._ahead: Offer | None = None
        """The offer that was sent ahead, until it is left."""
        self._left = torch.cuda.Event()
        """Comes after all reads of the memory's previous content."""
        self._copied: dict[Offer, torch.cuda.Event] = {}
        """Marks the end of each copy that may still be under way."""
        # The allocator may give out memory that its previous owner's queued work still uses, and may do the
        # same with this memory once it is freed.
        self._left.record(torch.cuda.current_stream(device))
        self._memory.record_stream(self._stream)

    def send(self, offer: Offer, source: Tensor) -> None:
        """Begin to copy the offer that will be applied next, unless another was sent before it."""
        if self._ahead is not None:
            return
        self._stream.wait_event(self._left)
        with torch.cuda.stream(self._stream):
            self._copy(offer, source)
        self._ahead = offer

    def has_arrived(self, offer: Offer) -> bool:
        return offer is self._ahead and self.is_read(offer)

    def values(self, offer: Offer, source: Tensor) -> Tensor:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_stream(self._stream)
        if offer is not self._ahead:
            with torch.cuda.stream(stream):  # this device need not be the current one
                self._copy(offer, source)
        return self._memory[: source.numel()]

    def leave(self, offer: Offer) -> None:
        """An offer was applied, or never will be."""
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
