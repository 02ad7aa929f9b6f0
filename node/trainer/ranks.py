"""One trainer of several processes: torchrun's ranks, under DistributedDataParallel or FSDP2.

The first rank talks to the daemon and forms the deltas; the others have no outer loop. At each step boundary
all ranks exchange one `team.Word`, a small all-reduce on the CPU. It sums what each rank trained on, and
carries what the first has decided. More is sent only if a fragment changes:

* plain parameters (DDP) are alike on all ranks, so the first rank works on its own and broadcasts them;
* sharded ones (DTensor) are gathered to full tensors on the first rank's CPU, and scattered again.
"""

import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossamer.node.trainer.parameters import deal_out, is_sharded, reshard
from gossamer.protocol.errors import ConfigError, DivergedError, UnreachableError
from gossamer.protocol.payloads.layout import Layout

# --- The processes that train one model, as their peer sees them: a `Team`, and the `Word` on which its ranks
# agree at each step boundary. Most nodes are a team of one, `Alone`; several are `ranks.Ranks`.

DONE, GAVE_UP = 1, 2
"""How what all ranks do together has ended: see `Word.done`."""


class Word(NamedTuple):
    """What the ranks agree on at a step boundary. The first three are sums over all ranks; the rest is what
    the first rank says."""

    tokens: int = 0
    """Tokens of this step, on all ranks together."""
    stop: int = 0
    """How many ranks have been told to stop."""
    leaving: int = 0
    """How many ranks have left their loops."""
    done: int = 0
    """Whether what all do together (beginning, settling) is over: `DONE` or `GAVE_UP`, else 0."""
    own_last: int = 0
    clock: int = 0
    swarm_tokens: int = 0
    links: int = 0
    version: int = 0
    taken: int = 0
    steps: int = 0
    own_tokens: int = 0
    loss: float = 0.0
    touched: frozenset[int] = frozenset()
    """Fragments that change now."""


class Team(Protocol):
    """The processes that train one model."""

    rank: int
    size: int

    def bind(self, layout: Layout) -> Mapping[str, Tensor]:
        """Learn which fragments there are; returns the whole parameters, for the first rank's outer loop."""
        ...

    def share(self, data: bytes) -> bytes:
        """Return the first rank's bytes on all ranks."""
        ...

    def agree(self, word: Word) -> Word:
        """Exchange words."""
        ...

    def full(self, fragments: frozenset[int]) -> AbstractContextManager[object]:
        """Inside, the first rank has these fragments whole and may change them; afterwards all ranks have the
        changes."""
        ...

    def close(self) -> None:
        """Nothing more will be exchanged."""
        ...


class Alone:
    """A team of one, which has nothing to agree on."""

    rank = 0
    size = 1

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def bind(self, layout: Layout) -> Mapping[str, Tensor]:
        return self._tensors

    def share(self, data: bytes) -> bytes:
        return data

    def agree(self, word: Word) -> Word:
        return word

    def full(self, fragments: frozenset[int]) -> AbstractContextManager[object]:
        return nullcontext()

    def close(self) -> None:
        pass


# --- Logs what a rank waits for: gloo itself says nothing for half an hour, and then little.

TELL_AFTER_S = 20.0
"""When to log for the first time; each next time comes after twice as long. Other ranks may just be busy,
with an evaluation say."""

POLL_S = 1.0

GLOO_LOST = re.compile(r"(?!\[enforce fail).*\bgloo[/\\]transport[/\\]")
"""gloo has no error class for a lost connection: its message names the place in its transport code."""

NCCL_OWN = ("ncclUnhandledCudaError", "ncclInvalidArgument", "ncclInvalidUsage")
"""NCCL results that are the fault of this rank, or of its device."""

log = logging.getLogger("gossamer.peer")


class Patience:
    """Tells the person what this rank waits for, if that takes long. Belongs to the training thread."""

    def __init__(self) -> None:
        self._wait: tuple[str, float] | None = None
        """What this rank waits for, and since when."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="patience", daemon=True)

    @contextmanager
    def during(self, text: str) -> Iterator[None]:
        """Inside, this rank waits for the others. Raises UnreachableError if they are gone.

        Any other error, such as memory that runs out, passes through unchanged.
        """
        if self._thread.ident is None:
            self._thread.start()
        self._wait = text, time.monotonic()
        try:
            yield
        except RuntimeError as error:
            said = str(error)
            if not _tells_of_loss(error, said):
                raise
            raise UnreachableError(
                "lost the other ranks of this node: one of them ended, and its last lines say why"
                f" ({said.partition(chr(10))[0][:160]})"
            ) from error
        finally:
            self._wait = None

    def close(self) -> None:
        """End the thread: there is nothing more to wait for."""
        self._over.set()

    def _watch(self) -> None:
        told: tuple[str, float] | None = None
        tell_after = TELL_AFTER_S
        while not self._over.wait(POLL_S):
            wait = self._wait
            if wait is None:
                continue
            if wait != told:
                told, tell_after = wait, TELL_AFTER_S
            text, since = wait
            waited = time.monotonic() - since
            if waited >= tell_after:
                tell_after = 2 * waited
                log.warning("%s (waited %.0f s)", text, waited)


def _tells_of_loss(error: RuntimeError, said: str) -> bool:
    """Whether torch's error means that other ranks cannot be reached: a connection, a store, a timeout."""
    if isinstance(error, dist.DistError):
        return not any(result in said for result in NCCL_OWN)
    return GLOO_LOST.match(said) is not None


NUMBERS = len(Word._fields) - 1
"""How many fields of a word are sent as they are: whole numbers, and the loss last. In place of `touched`, a
number for each fragment follows."""

SUMMED = 3
"""How many of a word's first fields are summed over the ranks. The others are the first rank's."""

CHANGED, DIVERGED, FAILED = 0, 1, 2
"""What has become of the fragments on the first rank."""

SAMPLE = 64
"""How many of a fragment's tensors the ranks compare, and how many values of each."""

FOR_THE_FIRST = "waiting for the first rank, which starts the node"
FOR_ATTACHING = "waiting for the other ranks of this node: each has to attach"
FOR_STEPS = (
    "waiting for the other ranks: each has to call step and finish, and to leave its loop, when this one does"
)
FOR_LEAVING = (
    "this rank has left its training loop and waits for the others to leave theirs. All have to leave at the"
    " same step (calling request_stop first ensures it): one that goes on may be waiting for this one's"
    " gradients"
)


class Ranks:
    """All ranks of torch.distributed's default group. All methods but `close` are collectives: every rank
    calls them.

    They raise UnreachableError if another rank is gone.
    """

    def __init__(self, tensors: Mapping[str, Tensor], model: nn.Module | None = None) -> None:
        """`model` holds the tensors, and may be sharded by FSDP2."""
        self._tensors = tensors
        self._model = model if any(map(is_sharded, tensors.values())) else None
        self._fragments: Sequence[Sequence[str]] = ()
        self._copies: dict[str, Tensor] = {}
        self._patience = Patience()
        self._has_trained = False
        """Whether the ranks have trained since all of them were given the same parameters."""
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        if self.rank == 0 and self.size > 1:
            log.info("waiting for all %d ranks of this node: each has to attach", self.size)
        try:
            with self._patience.during(FOR_ATTACHING):
                # Words are numbers on the CPU, whatever the model is on: no rank waits for its device.
                self._cpu = dist.new_group(backend="gloo")
        except BaseException:
            self._patience.close()
            raise

    def bind(self, layout: Layout) -> Mapping[str, Tensor]:
        if not self._fragments:
            self._fragments = [[slot.spec.name for slot in fragment.slots] for fragment in layout.fragments]
            with self._patience.during(FOR_ATTACHING):
                for fragment in range(len(self._fragments)):
                    self._gather(fragment)
        return {**self._tensors, **self._copies}

    def share(self, data: bytes) -> bytes:
        length = torch.tensor([len(data)], device="cpu")
        with self._patience.during(FOR_THE_FIRST):
            dist.broadcast(length, 0, group=self._cpu)
            numbers = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
            if self.rank == 0 and data:
                numbers.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            dist.broadcast(numbers, 0, group=self._cpu)
        return numbers.numpy().tobytes()

    def agree(self, word: Word) -> Word:
        self._check_group()
        told = [*word[:NUMBERS], *(fragment in word.touched for fragment in range(len(self._fragments)))]
        if self.rank > 0:
            told[SUMMED:] = [0.0] * (len(told) - SUMMED)
        # float64 holds every integer here exactly: none comes near 2**53.
        # The CPU is named, since a script may have set another default device.
        numbers = torch.tensor(told, dtype=torch.float64, device="cpu")
        with self._patience.during(FOR_LEAVING if word.leaving else FOR_STEPS):
            dist.all_reduce(numbers, group=self._cpu)
        said = numbers.tolist()
        *counts, loss = said[:NUMBERS]
        touched = frozenset(i for i, touches in enumerate(said[NUMBERS:]) if touches)
        agreed = Word._make((*map(int, counts), loss, touched))
        # While only some ranks have left their loops, the others have trained further, so a difference is no
        # error then: what the first rank holds is published.
        self._has_trained = (self._has_trained or agreed.tokens > 0) and agreed.leaving in (0, self.size)
        return agreed

    @contextmanager
    def full(self, fragments: frozenset[int]) -> Iterator[None]:
        """Raises ConfigError on all ranks if each has trained by itself.

        An error that the first rank raises inside reaches the others as DivergedError or UnreachableError;
        otherwise they would wait for the first.
        """
        if not fragments:
            yield
            return
        with self._patience.during(FOR_STEPS):
            for fragment in sorted(fragments):
                if self._has_trained:
                    self._check_alike(fragment)
                self._gather(fragment)
        try:
            yield
        except Exception as error:
            with suppress(UnreachableError):
                self._end(fragments, DIVERGED if isinstance(error, DivergedError) else FAILED)
            raise
        self._end(fragments, CHANGED)

    def close(self) -> None:
        self._patience.close()

    def _end(self, fragments: frozenset[int], outcome: int) -> None:
        """Give all ranks the first's fragments and the outcome; the others raise it if it is an error."""
        firsts = torch.tensor([outcome], device="cpu")
        with self._patience.during(FOR_STEPS):
            dist.broadcast(firsts, 0, group=self._cpu)
            for fragment in sorted(fragments) if firsts != FAILED else ():
                self._scatter(fragment)
        if self._model is not None:
            reshard(self._model)
        if self.rank > 0 and firsts == DIVERGED:
            raise DivergedError("the first rank found that the model diverged: its error says where")
        if self.rank > 0 and firsts == FAILED:
            raise UnreachableError("the first rank of this node failed: its last lines say why")

    def _check_group(self) -> None:
        """Raise ConfigError if torch.distributed no longer knows the ranks."""
        try:
            dist.get_rank(self._cpu)
        except ValueError:
            raise ConfigError(
                "torch.distributed's process group was destroyed while the peer was attached: leave the"
                " `with` before destroy_process_group"
            ) from None

    def _check_alike(self, fragment: int) -> None:
        """Compare some values of plain parameters: ranks that exchange gradients hold the same."""
        tensors = [self._tensors[name].detach() for name in self._fragments[fragment]]
        plain = [tensor for tensor in tensors if not is_sharded(tensor)]
        if not plain:
            return
        samples = [tensor.flatten()[:SAMPLE].float() for tensor in plain[:SAMPLE]]
        # One copy from each device, for all of its samples.
        of_devices = [torch.cat([*run]).cpu() for _, run in groupby(samples, lambda sample: sample.device)]
        mine = torch.cat(of_devices).nan_to_num()
        firsts = mine.clone()
        dist.broadcast(firsts, 0, group=self._cpu)
        different = (mine != firsts).float().mean()
        dist.all_reduce(different, dist.ReduceOp.MAX, group=self._cpu)
        if different > 0.5:  # devices may round a value here and there differently
            raise ConfigError(
                "the ranks hold different parameters, so each trains by itself: wrap the model in"
                " DistributedDataParallel, and call that"
            )

    def _gather(self, fragment: int) -> None:
        for name in self._fragments[fragment]:
            tensor = self._tensors[name].detach()
            if is_sharded(tensor):
                whole = tensor.full_tensor()  # type: ignore[attr-defined]
                if self.rank == 0:
                    copy = torch.empty(whole.shape, dtype=whole.dtype, device="cpu")
                    self._copies.setdefault(name, copy).copy_(whole)

    def _scatter(self, fragment: int) -> None:
        for name in self._fragments[fragment]:
            tensor = self._tensors[name].detach()
            if is_sharded(tensor):
                deal_out(self._copies.get(name), tensor)
            else:
                # A broadcast sends raw memory, which may have gaps, or another order on other ranks.
                whole = tensor.contiguous()
                dist.broadcast(whole, 0)
                if whole is not tensor:
                    tensor.copy_(whole)


def team_of(tensors: Mapping[str, Tensor], model: nn.Module) -> Team:
    """The team that this process belongs to: all ranks of torch.distributed, if that is initialised.

    `tensors` are the model's parameters.
    """
    if not (dist.is_available() and dist.is_initialized()):
        _warn_of_processes_that_are_no_ranks()
        return Alone(tensors)
    if dist.get_world_size() == 1 and not any(map(is_sharded, tensors.values())):
        return Alone(tensors)
    return Ranks(tensors, model)


def _warn_of_processes_that_are_no_ranks() -> None:
    """Warn under torchrun if torch.distributed is not initialised yet: each process becomes a node then."""
    count = os.environ.get("WORLD_SIZE", "1")
    if dist.is_available() and dist.is_torchelastic_launched() and count != "1":
        log.warning(
            "torchrun started %s processes, and each of them becomes a node of its own, since"
            " torch.distributed is not initialised: to make them one node, call init_process_group before"
            " attach",
            count,
        )
