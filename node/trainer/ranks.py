"""One trainer of several processes: torchrun's ranks, under DistributedDataParallel or FSDP2.

The first rank talks to the daemon and forms the deltas (`outer.Leader`); the others have no outer loop and no
daemon (`Rank`). At each step boundary all ranks exchange one `Word`, a small all-reduce on the CPU. It
sums what each rank trained on, and carries what the first has decided. More is sent only if a fragment
changes:

* plain parameters (DDP) are alike on all ranks, so the first rank works on its own and broadcasts them;
* sharded ones (DTensor) are gathered to full tensors on the first rank's CPU, and scattered again.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gossamer.node.ipc.messages import NOT_EVALUATED, Evaluation
from gossamer.node.logs import RateLimit
from gossamer.node.trainer.attach import DaemonProcess
from gossamer.node.trainer.checkpoint import Progress
from gossamer.node.trainer.daemon_link import OUTDATED
from gossamer.node.trainer.draws import Draws, Walk
from gossamer.node.trainer.parameters import Binding, StepBoundary, deal_out, is_sharded, reshard
from gossamer.node.trainer.phi_updates import EvaluatedAverage
from gossamer.protocol.errors import ConfigError, StorageError, UnreachableError
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.payloads import Layout, Slot

DONE, GAVE_UP = 1, 2
"""How what all ranks do together has ended: see `Word.done`."""

SAMPLE = 64
"""How many of a fragment's tensors the ranks compare, and how many values of each."""

LOG_AFTER_S = 20.0
"""When to log what is waited for: gloo itself says nothing for half an hour. Other ranks may just be busy,
with an evaluation say."""

WATCH_EVERY_S = 1.0

WAITING = (
    "waiting for the other ranks of this node: each has to attach, to call step and finish when this one"
    " does, and to leave its loop at the same step (calling request_stop first ensures it)"
)

log = logging.getLogger("gossamer.peer")


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
    applied: int = 0
    steps: int = 0
    own_tokens: int = 0
    loss: float = 0.0
    touched: frozenset[int] = frozenset()
    """Fragments that change now."""


NUMBERS = len(Word._fields) - 1
"""How many fields of a word are sent as they are: whole numbers, and the loss last. In place of `touched`, a
number for each fragment follows."""

SUMMED = 3
"""How many of a word's first fields are summed over the ranks. The others are the first rank's."""


class Team:
    """The processes that train one model: all ranks of torch.distributed's default group, or just this one,
    which has nothing to agree on.

    All methods but `close` are collectives: every rank calls them. They raise UnreachableError if another
    rank is gone.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], model: nn.Module | None = None, *, alone: bool = True
    ) -> None:
        """`tensors` are the parameters of `model`, which may be sharded by FSDP2. `alone`: it is just this
        process, and nothing is sharded."""
        self._tensors = tensors
        self._model = model if any(map(is_sharded, tensors.values())) else None
        self._is_alone = alone
        self._fragments: Sequence[Sequence[Slot]] = ()
        self._copies: dict[str, Tensor] = {}
        self._has_trained = False
        """Whether the ranks have trained since all of them were given the same parameters."""
        self._waits_since: float | None = None
        self._closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="wait-watch", daemon=True)
        self.rank, self.size = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
        if alone:
            return
        self._watcher.start()
        try:
            with self._waiting():
                # Words are numbers on the CPU, whatever the model is on: no rank waits for its device.
                self._cpu = dist.new_group(backend="gloo")
        except BaseException:
            self.close()
            raise

    def bind(self, layout: Layout) -> Mapping[str, Tensor]:
        """Learn which fragments there are; returns the whole parameters, for the first rank's outer loop."""
        if not self._fragments:
            self._fragments = [fragment.slots for fragment in layout.fragments]
            with self._waiting():
                for fragment in range(len(self._fragments)):
                    self._gather(fragment)
        return {**self._tensors, **self._copies}

    def boundary(self, tensors: Sequence[Tensor]) -> StepBoundary:
        """Whether the parameters, `tensors` in the first rank's outer loop, are as at a step boundary."""
        # Sharded ones are there as copies; their ranks leave only together, at a step boundary.
        return StepBoundary(() if any(map(is_sharded, self._tensors.values())) else tensors)

    @property
    def device(self) -> str:
        """Where this rank trains, for displays."""
        return str(next(iter(self._tensors.values())).device)

    @property
    def fragments(self) -> frozenset[int]:
        """All of them, by index."""
        return frozenset(range(len(self._fragments)))

    def share(self, data: bytes, rank: int = 0) -> bytes:
        """Return the bytes of the first rank, or of another one, on all ranks."""
        if self._is_alone:
            return data
        length = torch.tensor([len(data)], device="cpu")
        with self._waiting():
            dist.broadcast(length, rank, group=self._cpu)
            numbers = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
            if self.rank == rank and data:
                numbers.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            dist.broadcast(numbers, rank, group=self._cpu)
        return numbers.numpy().tobytes()

    def agree(self, word: Word) -> Word:
        """Exchange words."""
        if self._is_alone:
            return word
        own = [*word[:NUMBERS], *(fragment in word.touched for fragment in range(len(self._fragments)))]
        if self.rank > 0:
            own[SUMMED:] = [0.0] * (len(own) - SUMMED)
        # float64 holds every integer here exactly: none comes near 2**53.
        # The CPU is named, since a script may have set another default device.
        numbers = torch.tensor(own, dtype=torch.float64, device="cpu")
        with self._waiting():
            dist.all_reduce(numbers, group=self._cpu)
        *counts, loss = numbers[:NUMBERS].tolist()
        touched = frozenset(numbers[NUMBERS:].nonzero().view(-1).tolist())
        agreed = Word._make((*map(int, counts), loss, touched))
        # While only some ranks have left their loops, the others have trained further, so a difference is no
        # error then: what the first rank holds is published.
        self._has_trained = (self._has_trained or agreed.tokens > 0) and agreed.leaving in (0, self.size)
        return agreed

    @contextmanager
    def full(self, fragments: frozenset[int]) -> Iterator[None]:
        """Inside, the first rank has these fragments whole and may change them; afterwards all ranks have the
        changes. Raises ConfigError on all ranks if each has trained by itself.

        An error that the first rank raises inside ends it, which the others see as UnreachableError.
        """
        if self._is_alone or not fragments:
            yield
            return
        with self._waiting():
            for fragment in sorted(fragments):
                if self._has_trained:
                    self._check_alike(fragment)
                self._gather(fragment)
        yield
        with self._waiting():
            dist.barrier(group=self._cpu)  # gloo notices at once if the first has ended, and NCCL does not
            for fragment in sorted(fragments):
                self._scatter(fragment)
        if self._model is not None:
            reshard(self._model)

    def close(self) -> None:
        """Nothing more will be exchanged."""
        self._closed.set()
        if self._watcher.ident is not None:
            # It holds torch's group through this team. Freeing a group while the interpreter ends aborts it.
            self._watcher.join()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Inside, this rank exchanges with the others. Raises UnreachableError if that fails."""
        self._waits_since = time.monotonic()
        try:
            yield
        except RuntimeError as error:  # gloo has no class of its own for a lost connection
            raise UnreachableError(
                "cannot reach the other ranks of this node: if one of them ended, its last lines say why"
                f" ({str(error).partition(chr(10))[0][:160]})"
            ) from error
        finally:
            self._waits_since = None

    def _watch(self) -> None:
        """Log that this rank waits, if that takes long."""
        limit = RateLimit()
        while not self._closed.wait(WATCH_EVERY_S):
            since = self._waits_since
            if since and time.monotonic() - since >= LOG_AFTER_S and limit.allows(since):
                log.warning("%s (waited %.0f s)", WAITING, time.monotonic() - since)

    def _check_alike(self, fragment: int) -> None:
        """Compare some values of plain parameters: ranks that exchange gradients hold the same."""
        tensors = [self._tensors[slot.spec.name].detach() for slot in self._fragments[fragment]]
        plain = [tensor for tensor in tensors if not is_sharded(tensor)][:SAMPLE]
        if not plain:
            return
        mine = torch.cat([tensor.flatten()[:SAMPLE].float().cpu() for tensor in plain]).nan_to_num()
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
        for name in {slot.spec.name: None for slot in self._fragments[fragment]}:
            tensor = self._tensors[name].detach()
            if is_sharded(tensor):
                whole = tensor.full_tensor()  # type: ignore[attr-defined]
                if self.rank == 0:
                    copy = torch.empty(whole.shape, dtype=whole.dtype, device="cpu")
                    self._copies.setdefault(name, copy).copy_(whole)

    def _scatter(self, fragment: int) -> None:
        for slot in self._fragments[fragment]:
            tensor = self._tensors[slot.spec.name].detach()
            if is_sharded(tensor):
                deal_out(self._copies.get(slot.spec.name), tensor)
            else:
                # A broadcast sends raw memory, which may have gaps, or another order on other ranks.
                whole = tensor.contiguous()
                dist.broadcast(whole.view(-1)[slot.strip], 0)
                if whole is not tensor:
                    tensor.copy_(whole)


def team_of(tensors: Mapping[str, Tensor], model: nn.Module) -> Team:
    """The team that this process belongs to: all ranks of torch.distributed, if that is initialised."""
    if dist.is_available() and dist.is_initialized():
        is_alone = dist.get_world_size() == 1 and not any(map(is_sharded, tensors.values()))
        return Team(tensors, model, alone=is_alone)
    count = os.environ.get("WORLD_SIZE", "1")
    if dist.is_available() and dist.is_torchelastic_launched() and count != "1":
        log.warning(
            "torchrun started %s processes, and each of them becomes a node of its own, since"
            " torch.distributed is not initialised: to make them one node, call init_process_group before"
            " attach",
            count,
        )
    return Team(tensors)


# --- What one process does for its node: the first rank leads, and the others follow.


@dataclass(frozen=True, slots=True)
class RankContext:
    """What a rank's work depends on."""

    team: Team
    stop_round: int = 0
    """The last round to publish; 0 for no limit."""
    daemon: DaemonProcess | None = None
    """None for the built-in trainer, which has no daemon of its own and no SIGTERM to catch."""
    extra_stop_s: float = 0.0
    """How long leaving may wait for the rounds of all fragments with open windows."""


class Rank:
    """One rank of a node, which does what the first has decided. The first itself is `outer.Leader`.

    Every method is called on all ranks alike, exchanges as many words on each, and all see the swarm as the
    first saw it at the last step boundary, so that all decide alike.
    """

    def __init__(self, model: nn.Module, manifest: Manifest, node_id: bytes, context: RankContext) -> None:
        """`node_id` is the node's, the same on all its ranks."""
        self._binding = Binding(model, manifest)
        self._stop_round = context.stop_round
        self._word = Word()
        self.node_id = node_id
        self.team = context.team
        self.daemon = context.daemon
        self.progress = Progress()
        self.resumed = False
        self.version = 0
        self.applied = 0
        """Steps that have applied a newer Phi. Unlike the version, it does not restart with the daemon."""
        self.last_loss = 0.0
        self.begun_at = time.perf_counter()
        self.outer_s = 0.0
        """Seconds since `begun_at` in which `step` has kept the loop from inner steps."""
        self._evaluated: EvaluatedAverage | None = None
        """Only the first rank has it."""
        self.draws: Draws | None = None
        """What this rank draws of the data that the whole swarm goes through, if there is any."""
        if manifest.data.blocks:
            seed = int.from_bytes(node_id[:8])
            walk = Walk(manifest.data.blocks, seed, self.team.rank, self.team.size)
            self.draws = Draws(manifest.data, manifest.swarm_id, walk)
        self.stop_requested = False
        """Whether the script wants its loop to end; with several ranks, all see it at the next step."""

    @property
    def seen(self) -> Word:
        """What the swarm looks like; with several ranks, as the first told all of them at the last step."""
        return self._word

    @property
    def wait_fraction(self) -> float:
        """Fraction of the wall time since `begin` that was spent in `step`, and not in inner steps."""
        return self.outer_s / max(1e-9, time.perf_counter() - self.begun_at)

    @property
    def is_outdated(self) -> bool:
        """Whether the daemon is of another release than this process."""
        return False

    @property
    def should_stop(self) -> bool:
        return bool(self._word.stop or self._word.leaving) if self.team.size > 1 else self._must_stop

    @property
    def _must_stop(self) -> bool:
        return self.stop_requested or (self.daemon is not None and self.daemon.must_stop)

    def ending(self) -> BaseException:
        """The exception for a loop that goes on although it should stop."""
        assert self.daemon is not None
        if self.is_outdated:
            return ConfigError(f"{OUTDATED}: start this script again, which goes on from its folder")
        if self._word.leaving:
            return ConfigError(
                "another rank of this node has left its training loop, and all have to leave theirs at the"
                " same step: call request_stop, and break when should_stop says so"
            )
        return self.daemon.ending()

    @property
    def finished(self) -> bool:
        seen = self.seen
        # The swarm may have skipped the last round.
        return 0 < self._stop_round < max(seen.own_last + 1, seen.clock)

    def begin(self, on_wait: Callable[[], None] | None = None) -> bool:
        """Wait for the swarm's model and load it. Returns False if the node is stopping instead."""
        while not self._follow().done:
            pass
        return not self._word.stop

    def step(self, tokens: int, loss: float | Tensor) -> int | None:
        """Record an inner step; apply and publish what is due. Returns the round published, if any."""
        own_last = self._word.own_last
        word = self._follow(tokens)
        self.progress = Progress(word.steps + 1, word.own_tokens + word.tokens)
        if self.draws is not None:
            self.draws.stepped(self.progress.steps)
        return word.own_last if word.own_last > own_last else None

    def await_daemon(self, timeout_s: float) -> None:
        """Wait for a daemon that has ended and is being started again, if the open window holds anything."""

    def publish_early(self, timeout_s: float) -> bool:
        """Publish what the open window holds although the loop goes on, if the parameters are as at the last
        step boundary. Returns whether they were. Several ranks, which may be anywhere in their loops, only
        publish together, as they leave."""
        return False

    def flush(self, timeout_s: float) -> None:
        """Before leaving: if the parameters are as at the last step boundary, publish what the open window
        holds and save a checkpoint. Wait until the last delta is on disk."""
        self.stop_requested = False
        while self._follow(leaving=1).leaving < self.team.size:
            pass
        while self._follow().touched:  # one fragment after another
            pass

    def drop_progress(self) -> None:
        """Go back to Phi, and discard what the open windows hold."""
        self._binding.check(always=True)
        self._follow()

    def settle(self) -> bool:
        """After `drop_progress`: apply Phi as it changes. Returns whether it did; on the first rank, which
        alone knows what is to come, also whether it may be about to."""
        return bool(self._follow().touched)

    def agree_done(self, done: int) -> int:
        """Say whether what all ranks do together is over. Returns what the first rank says."""
        return self._follow().done

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the parameters are those of the averaged model. Raises StorageError if it is not here."""
        if problem := self.team.share(self._evaluated.read() if self._evaluated else b""):
            raise StorageError(problem.decode())
        try:
            with self.team.full(self.team.fragments):
                if self._evaluated:
                    self._evaluated.use_average()
            yield
        finally:  # also if Ctrl-C came while the parameters changed
            with self.team.full(self.team.fragments):
                if self._evaluated:
                    self._evaluated.use_live()

    def report(self, state: str, evaluation: Evaluation = NOT_EVALUATED) -> None:
        """Tell the daemon how training is doing, twice a second at most; only the first rank does."""

    def close(self) -> None:
        """Disconnect from the daemon; an attached script's daemon stops, even if Ctrl-C cuts this short."""
        self.team.close()
        if self.daemon is not None:
            self.daemon.stop()

    def _share_draws(self, word: Word) -> None:
        """Where something changes: the first rank tells the others what is taken of the data, and they tell
        it what they have trained on."""
        if self.draws is None or self.team.size == 1 or not word.touched:
            return
        taken = self.team.share(self.draws.taken)
        if taken and self.team.rank > 0:
            self.draws.learn(taken)
        for rank in range(1, self.team.size):
            trained = np.array([(step, *block) for step, block in self.draws.trained], np.int64)
            found = np.frombuffer(self.team.share(trained.tobytes(), rank), np.int64).reshape(-1, 3).tolist()
            if self.team.rank == 0:
                self.draws.trained += [(step, (epoch, number)) for step, epoch, number in found]
        if self.team.rank > 0:
            self.draws.trained.clear()

    def _follow(self, tokens: int = 0, *, leaving: int = 0) -> Word:
        """Exchange one word, and take part in what it says."""
        word = self.team.agree(Word(tokens=tokens, stop=int(self._must_stop), leaving=leaving))
        self._share_draws(word)
        if word.touched:
            self._binding.check()  # what this rank has replaced would go on without the swarm's values
        with self.team.full(word.touched):
            pass
        self._word = word  # only now: `full` raises if the first rank could not do what the word says
        self.version, self.applied, self.last_loss = word.version, word.applied, word.loss
        self.progress = Progress(word.steps, word.own_tokens)
        return word
