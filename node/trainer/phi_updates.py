"""Phi on its way to the model: which of the daemon's offers a step applies, and how they reach a GPU; and the
averaged model, which takes the live one's place for an evaluation.

A GPU copies a fragment by itself, from shared memory that is pinned for it, into memory that is kept for
this; the loop does not wait, and the fragment's shared memory is given back once the copy is over. A model on
the CPU or on devices of another kind, or a fragment on several devices, reads shared memory directly.
"""

import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from gossamer.node.daemon.phi.restore import averaged
from gossamer.node.home import Home
from gossamer.node.ipc.messages import SharedMemory
from gossamer.node.trainer.daemon_link import DaemonLink, Offer
from gossamer.node.trainer.parameters import StepBoundary
from gossamer.protocol.errors import LocalError
from gossamer.protocol.fixedpoint import to_float
from gossamer.protocol.payloads import Fragment

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for all GPUs."""

log = logging.getLogger("gossamer.peer")


class PhiUpdates:
    """The daemon's offers. Each waits here until it is applied, and until nothing reads its memory any
    more."""

    def __init__(
        self, link: DaemonLink, fragments: Sequence[Fragment], gpus: Sequence[torch.device | None]
    ) -> None:
        """`gpus` are the CUDA devices that hold all of a fragment, where one does."""
        self._link = link
        self._fragments = fragments
        self._gpus = gpus
        self._waiting: list[Offer] = []
        self._read: list[tuple[Offer, torch.cuda.Event | None]] = []
        """Applied or outdated; the event comes after a GPU has copied it."""
        self._pinned: SharedMemory | None = None
        """The shared memory that was pinned last."""
        largest = max((fragment.numel for fragment in fragments), default=0)
        self._rooms = {
            gpu: torch.empty(largest, dtype=torch.int32, device=gpu) for gpu in gpus if gpu is not None
        }
        """Memory of each GPU for one fragment."""

    def all(self) -> list[Offer]:
        """All offers that wait."""
        while (offer := self._link.take_offer()) is not None:
            self._waiting.append(offer)
        if self._read:
            self._give_back()
        return list(self._waiting)

    def for_step(self, round_: int | None) -> list[Offer]:
        """The offers to apply at a step, which publishes `round_` if that is not None: few enough not to hold
        it up. That is the oldest, and before a publish all up to the one of that fragment."""
        offers = self.all()
        due = None if round_ is None else round_ % len(self._fragments)
        return offers[: 1 + max((i for i, offer in enumerate(offers) if offer.fragment == due), default=0)]

    def values(self, offer: Offer) -> Tensor:
        """What to apply, int32[fragment.numel]; it holds until the next call, and until `done`."""
        source = torch.from_numpy(offer.shared.phi(self._fragments[offer.fragment]))
        gpu = self._gpus[offer.fragment]
        if gpu is None:
            return source
        if offer.shared is not self._pinned:
            self._pinned = offer.shared
            _pin(offer.shared, gpu)
        return self._rooms[gpu][: source.numel()].copy_(source, non_blocking=True)

    def done(self, offer: Offer) -> None:
        """An offer was applied, or is outdated."""
        self._waiting.remove(offer)
        gpu = self._gpus[offer.fragment]
        self._read.append((offer, None if gpu is None else _end_of_work(gpu)))
        self._give_back()

    def forget(self) -> None:
        """Drop all offers: the daemon is about to make them again, in other memory."""
        self.close()
        self._waiting, self._read = [], []

    def close(self) -> None:
        """Wait until no offer is being read any more: the shared memory may then be unmapped."""
        with suppress(RuntimeError):  # a GPU that has failed, which has ended training
            for gpu in self._rooms:
                _end_of_work(gpu).synchronize()

    def _give_back(self) -> None:
        """Return the memory of all offers that nothing reads any more to the daemon."""
        while self._read and ((event := self._read[0][1]) is None or event.query()):
            self._link.took(self._read.pop(0)[0])


def _end_of_work(gpu: torch.device) -> torch.cuda.Event:
    """Reached once a GPU has done all that the loop has asked of it so far."""
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(gpu))
    return event


def _pin(shared: SharedMemory, gpu: torch.device) -> None:
    """Pin a mapping, so that GPUs copy from and to it by themselves."""
    whole = torch.frombuffer(shared.whole, dtype=torch.uint8)
    runtime = torch.cuda.cudart()
    with torch.cuda.device(gpu):  # no other device needs a context for this
        failure = int(runtime.cudaHostRegister(whole.data_ptr(), whole.numel(), PORTABLE))
    if not failure:
        # Unpin it before it is unmapped: the mapping lives as long as `shared` and any view of it.
        weakref.finalize(shared, runtime.cudaHostUnregister, whole.data_ptr()).atexit = False
        return
    log.info(
        "training waits for copies to and from the GPU: no memory can be pinned (CUDA error %d)", failure
    )
    with suppress(RuntimeError):  # CUDA reports the failure once more, at the next call to the GPU
        torch.zeros(1, device=gpu)


class EvaluatedAverage:
    """The averaged model in the place of the live one, for an evaluation."""

    def __init__(self, home: Home, tensors: Mapping[str, Tensor], boundary: StepBoundary) -> None:
        """`tensors` are the parameters by name, whole."""
        self._home = home
        self._tensors = tensors
        self._boundary = boundary
        self._average: dict[str, Tensor] = {}
        """By name: the averaged model's values, once read."""
        self._live: dict[str, Tensor] = {}
        """By name: the parameters, while the average is in the model."""
        self._is_live_whole = False
        """Whether these are as at the last step boundary."""

    def read(self) -> bytes:
        """Read the averaged model from the node's folder. Returns why that failed, if it did."""
        try:
            manifest, _, phi = averaged(self._home)
        except LocalError as error:
            return str(error).encode()
        self._average = {
            spec.name: torch.from_numpy(to_float(values).reshape(spec.shape))
            for spec, values in manifest.plan().tensors(phi)
        }
        return b""

    @torch.no_grad()
    def use_average(self) -> None:
        """Set the parameters to what was read."""
        self._is_live_whole = self._boundary.holds
        self._live = {name: self._tensors[name].detach().clone() for name in self._average}
        for name, values in self._average.items():
            self._tensors[name].copy_(values)
        self._average.clear()

    @torch.no_grad()
    def use_live(self) -> None:
        """Put the parameters back, wherever `use_average` ended; they are at a boundary if they were."""
        for name, values in self._live.items():
            self._tensors[name].copy_(values)
        if self._live and self._is_live_whole:
            self._boundary.mark()
        self._live.clear()
