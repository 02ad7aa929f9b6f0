"""`Peer`: a training loop's membership in the swarm.

A training loop calls `step` after each inner step. `step` applies what the swarm has merged, and publishes
when the pace says so. The peer's `Role` does this work: of several ranks, the first leads and the others
follow.
"""

import atexit
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence, Sized
from math import isfinite
from multiprocessing.util import Finalize
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import Any, NoReturn, Self, SupportsFloat, SupportsInt

import numpy as np
import torch
from torch import Tensor, nn

from gossamer.models.task import named_tensors
from gossamer.node.home import Home
from gossamer.node.ipc.messages import Report
from gossamer.node.trainer import attach as attaching
from gossamer.node.trainer.daemon_link import CONNECT_TIMEOUT_S, DaemonLink
from gossamer.node.trainer.data import Schedule, Shard
from gossamer.node.trainer.metrics import Progress, Reporter
from gossamer.node.trainer.outer import Leader
from gossamer.node.trainer.ranks import DONE, GAVE_UP, RankContext, Role, Team
from gossamer.protocol.errors import ConfigError, LocalError, UnreachableError
from gossamer.protocol.limits import TOKENS_MAX
from gossamer.protocol.manifest import Manifest

# --- What a training loop passes to `step`, checked: the tokens that it trained on, and their loss.


def token_count(tokens: SupportsInt) -> int:
    """A step's tokens as an int, from any type of number. Raises ValueError if it is not a valid count."""
    try:
        if isinstance(tokens, Tensor):
            tokens = tokens.item()  # only one wait for the device
        count = 0 if isinstance(tokens, bool | np.bool_) else int(tokens)
        if count == tokens and 1 <= count <= TOKENS_MAX:
            return count
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor of several numbers
        pass
    raise ValueError(
        f"tokens is {tokens!r:.60}: give the step's tokens or samples, a whole number from 1 to 2**40"
    )


def mean_loss(loss: SupportsFloat | Tensor) -> float | Tensor:
    """A step's loss as a float, or as a tensor [] without its graph. Raises ValueError if it is not one
    number."""
    if isinstance(loss, Tensor):
        if loss.numel() != 1 or loss.is_complex():
            raise ValueError(
                f"loss is {loss.dtype} of shape {list(loss.shape)}: step takes one number, loss.mean()"
            )
        if loss.is_meta or loss.is_nested or loss.layout is not torch.strided:
            raise ValueError(
                "loss is a tensor without a value, or a sparse or nested one: step takes a plain number"
            )
        return loss.detach().view(())
    try:
        return float(loss)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"loss is {loss!r:.60}: step takes the step's mean loss, float('nan') if there is none"
        ) from None


# --- What a training loop may ask of its peer: where its model stands in the swarm.

WARM_UP_STEPS = 20
"""Inner steps over which a fresh inner optimizer's learning rate rises to its place."""


class Standing:
    """The half of `Peer` that only reads."""

    def __init__(self, model: nn.Module, role: Role) -> None:
        self.model = model
        self._role = role
        self._steps_run = 0

    @property
    def node_id(self) -> bytes:
        """This node's id, 32 bytes; the same on all its ranks."""
        return self._role.node_id

    @property
    def round(self) -> int:
        """The last round that this node has published."""
        return self._role.seen.own_last

    @property
    def clock(self) -> int:
        """The swarm's round clock; our own last round while the clock is unknown, as right after a sleep."""
        seen = self._role.seen
        return seen.clock if seen.clock >= 0 else seen.own_last

    @property
    def swarm_tokens(self) -> int:
        """Tokens that the whole swarm has trained on, by the deltas merged so far. Schedules depend on it."""
        return self._role.seen.swarm_tokens

    @property
    def progress(self) -> Progress:
        """How far this node has come over all its runs."""
        return self._role.progress

    @property
    def resumed(self) -> bool:
        """Whether the inner optimizer resumed the state of an earlier run."""
        return self._role.resumed

    @property
    def version(self) -> int:
        """The newest merge that the model has seen, as the daemon counts them since it started."""
        return self._role.version

    @property
    def last_loss(self) -> float:
        """Mean loss of the last window that was published, 0 before there is one."""
        return self._role.last_loss

    @property
    def should_stop(self) -> bool:
        """Whether the node is stopping: SIGTERM came, its daemon is done, or the script has asked for it.

        An attached loop may go on for one more step; the step after it raises SystemExit.
        """
        return self._role.should_stop

    @property
    def is_outdated(self) -> bool:
        """Whether the daemon is of another release than this process: only a new process can go on."""
        return self._role.is_outdated

    @property
    def finished(self) -> bool:
        """Whether this node has published its `stop_round`, or the swarm is past that round."""
        return self._role.finished

    @property
    def wait_fraction(self) -> float:
        """Fraction of the wall time since `begin` that was spent in `step`, and not in inner steps.

        An upper bound on waiting: it includes encoding, adding and every lock.
        """
        return self._role.outer_s / max(1e-9, time.perf_counter() - self._role.begun_at)

    def metrics(self) -> dict[str, Any]:
        """Where this node and its swarm are, for a script's own logger; costs nothing.

        `round`: the last that we published; `clock`: the swarm's round; `swarm_tokens`: tokens that the swarm
        has trained on, as merged so far; `tokens`, `steps`: this node's, over all its runs; `loss`: mean over
        our last published window, 0 before there is one; `version`: the newest merge that the model has seen;
        `wait_fraction`; `links`: how many nodes we are linked to.
        """
        return {
            "round": self.round,
            "clock": self.clock,
            "swarm_tokens": self.swarm_tokens,
            "tokens": self.progress.tokens,
            "steps": self.progress.steps,
            "loss": self.last_loss,
            "version": self.version,
            "wait_fraction": self.wait_fraction,
            "links": self._role.seen.links,
        }

    def lr_scale(self, schedule: Schedule) -> float:
        """Factor on the peak learning rate: the schedule at the swarm's tokens (see `schedules`).

        A fresh inner optimizer is also warmed up over `WARM_UP_STEPS` steps, since it knows nothing yet of a
        model that may be far along. Use it as ``LambdaLR(optimizer, lambda _: peer.lr_scale(schedule))``.

        Raises TypeError if the schedule cannot be called, ValueError if it returns anything but a finite
        factor of 0 or more.
        """
        if not callable(schedule):
            raise TypeError(f"lr_scale takes a function of the swarm's tokens, not {schedule!r:.60}")
        warm_up = 1.0 if self.resumed else min(1.0, (self._steps_run + 1) / WARM_UP_STEPS)
        factor = schedule(self.swarm_tokens)
        if not _is_factor(factor):
            raise ValueError(f"the schedule returned {factor!r:.60}: it must return a factor of 0 or more")
        return warm_up * float(factor)  # a tensor for a learning rate is more than some optimizers take

    def shard(self, dataset: Sized, *, fraction: float = 1.0) -> Shard:
        """A sampler that draws `dataset` in this node's own order; with `fraction`, a random part of it.

        It does not divide the data between nodes: two nodes may draw the same samples. Raises ConfigError.
        """
        try:
            size = len(dataset)
        except (TypeError, NotImplementedError):  # an IterableDataset, or a DataPipe, has none
            raise ConfigError(
                f"{type(dataset).__name__} has no length: shard takes an indexed dataset. Shuffle a"
                " streaming one with a seed of this node's own, such as peer.node_id"
            ) from None
        return Shard(
            size,
            node_id=self.node_id,
            begun_at=self.progress.steps,
            fraction=fraction,
            rank=self._role.team.rank,
            ranks=self._role.team.size,
        )


def _is_factor(given: object) -> bool:
    """Whether a schedule may return this: a finite number, 0 or more."""
    try:
        return isinstance(given, SupportsFloat) and isfinite(given) and float(given) >= 0
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last two: 10**400, a tensor of several
        return False


LEAVE_S = 2.0
"""How long leaving waits for the last delta to be on disk."""

POLL_S = 0.01

log = logging.getLogger("gossamer.peer")


class Peer(Standing):
    """One model's place in the swarm. Not thread-safe: it belongs to the training thread.

    A script makes one with `attach`. The built-in trainer, whose daemon the supervisor runs, uses `connect`.
    """

    def __init__(
        self, model: nn.Module, role: Role, optimizers: Sequence[torch.optim.Optimizer] = ()
    ) -> None:
        super().__init__(model, role)
        self._optimizers = optimizers
        self.contact = ""
        """Where others join an attached peer's node: the first address that it advertises, or else the one
        at which this machine reaches it. Only the first rank knows it."""
        self.folder: Path | None = None
        """The folder of an attached peer's node. Only the first rank knows it."""
        self._callbacks: list[Callable[[Peer], object]] = []
        self._told_taken = 0
        """The count of `Role.applied` that the callbacks were last called for."""
        _, first = named_tensors(model, frozen=True)[0]
        self._reporter = Reporter(str(first.device))
        self._stepping: int | None = None
        """The thread that is in `step`. A lock would stay taken if Ctrl-C came between taking it and the
        `try` that releases it."""
        self._told_to_stop = False
        self._left = False
        self._is_closed = False
        self._pid = os.getpid()
        self._at_exit: Finalize | None = None

    @classmethod
    def connect(
        cls,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        folder: Path,
        manifest: Manifest,
        *,
        stop_round: int = 0,
    ) -> "Peer":
        """Connect to the daemon that runs in `folder`; call `begin` next.

        Args:
            model: on its device already; must fit `manifest`.
            optimizers: the inner optimizers, whose state the node's checkpoint keeps.
            stop_round: publish no round past this one; 0 for no limit.

        Raises UnreachableError if no daemon answers there, ConfigError if the model does not fit.
        """
        home = Home(folder)
        team = Team(dict(named_tensors(model, frozen=True)))
        link = DaemonLink(home.socket_path(), manifest)
        try:
            if not link.wait_connected(CONNECT_TIMEOUT_S):
                raise UnreachableError(
                    f"no daemon has answered at {home.socket_path()} for {CONNECT_TIMEOUT_S:.0f} s"
                    f" ({link.problem})"
                )
            context = RankContext(team, stop_round)
            leader = Leader(model, optimizers, manifest, link, context, home.checkpoint_path)
            return cls(model, leader, optimizers)
        except BaseException:
            link.close()
            raise

    @classmethod
    def attach(
        cls,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        manifest: Manifest | str | os.PathLike[str] | None = None,
        join: Collection[str] = (),
        invite: str | None = None,
        folder: str | os.PathLike[str] | None = None,
        name: str = "",
        listen: str = "[::]:0",
        advertise: Sequence[str] = (),
        swarm_id: str | None = None,
        trust: Collection[str] = (),
        stop_round: int = 0,
        plaintext: bool = False,
        debug: bool = False,
    ) -> "Peer":
        """Make this script a node: start a daemon beside it, wait for the swarm's model, and load it.

        Use the peer in a `with`, and call `step` after each step of the optimizer. If torch.distributed is
        initialised, all its ranks are one node: every rank calls `attach`, `step` and `finish`, if one does,
        and leaves the `with`.

        Args:
            model: on its device already. The parameters that the manifest lists become the swarm's. All other
                parameters must be frozen; they and the buffers (a batch norm's statistics) stay this node's
                own. The model may be compiled, wrapped in DistributedDataParallel, or sharded by FSDP2.
            optimizer: any inner optimizer, or several, each with its own share of the parameters.
            manifest: the swarm's manifest, as a TOML file or already read; None takes it from `join` or
                `folder`.
            join: nodes of the swarm, ``HOST:PORT`` or ``gossamer://NODE_ID@HOST:PORT``. Without any, the node
                in `folder` resumes; a new node founds the swarm, and `model` must then hold the swarm's first
                parameters.
            invite: what ``gossamer invite`` printed for this node, or its file.
            folder: the node's folder; the default is that of ``gossamer node``, ~/.gossamer/SWARM. Two nodes
                on one machine need two folders.
            name: the node's name in displays.
            listen: the address to listen on; port 0 picks one, [::] is every address, 0.0.0.0 all of IPv4.
            advertise: addresses to announce to others, where those differ from `listen`.
            swarm_id: refuse any swarm but this one (its id, or the beginning of it).
            trust: ids of nodes that decide which model to start from, where members disagree.
            stop_round: publish no round past this one; 0 for no limit. See `finished`.
            plaintext: no TLS. For tests on loopback; all nodes must do the same.
            debug: have the daemon log more.

        Raises:
            ConfigError: the model, manifest, folder or addresses do not fit (the message says which, and
                how), or the call is made under torch.inference_mode().
            UnreachableError: no node answers at `join`, and the manifest has to come from there (otherwise
                `attach` waits for an answer), the daemon keeps ending before it listens, or another rank of
                this node is gone.
            StorageError: the folder cannot be used.
            SystemExit: the node was told to stop before it had the model.
        """
        place = None
        try:
            place = attaching.attach(
                model,
                optimizer,
                manifest=manifest,
                join=join,
                invite=invite,
                folder=folder,
                name=name,
                listen=listen,
                advertise=advertise,
                swarm_id=swarm_id,
                trust=trust,
                stop_round=stop_round,
                plaintext=plaintext,
                debug=debug,
            )
            peer = cls(model, place.role, place.optimizers)
            peer.folder, peer.contact = place.folder, place.contact
            peer._begin_attached(place.tell_waiting)
            return peer
        except BaseException:  # also Ctrl-C at any point: nothing else would stop the daemon
            if place is not None:
                place.role.close()
            raise

    def _begin_attached(self, tell_waiting: Callable[[], None]) -> None:
        """Wait for the swarm's model."""

        def on_wait() -> None:
            self._tell("joining")
            tell_waiting()

        try:
            self._leave_at_exit_too()
            if not self.begin(on_wait):
                raise self._role.ending()
            attaching.claim(self)
        except BaseException:
            self._left = True
            self._forget_exit()
            raise

    # -- what the loop does

    def begin(self, on_wait: Callable[[], None] | None = None) -> bool:
        """Wait for the swarm's model and load it. Returns False if the node is stopping instead.

        Training waits for the network here only: no node should train from fresh weights because a peer was
        slow.
        """
        has_begun = self._role.begin(on_wait)
        self._told_taken = self._role.applied
        return has_begun

    def step(self, tokens: SupportsInt, loss: SupportsFloat | Tensor) -> int | None:
        """Record an inner step; apply and publish what is due. Returns the round published, if any.

        Call it once per step of the optimizer, not per micro-batch, and never between a forward pass, its
        backward pass and that step. With several ranks, every rank calls it.

        Args:
            tokens: tokens (or samples, always the same unit) that this step trained on, on this rank; a
                whole number, at least 1. Deltas are weighted by it.
            loss: the mean loss over these tokens, for displays; a tensor of one element stays on its device
                until the window closes.

        Raises:
            ValueError: `tokens` is no such count, or `loss` is not one number; the step was not recorded.
            RuntimeError: the peer has left, `step` is running already, or this is a forked process.
            ConfigError: the model's parameters are not those that it attached with.
            UnreachableError: another rank of this node is gone.
            SystemExit: the loop went on although `should_stop` was true (attached peers only).
        """
        thread = get_ident()
        if self._stepping is not None:
            raise RuntimeError(
                "step is already running, in another thread or around this callback: a peer has one loop"
            )
        self._stepping = thread  # nothing is called between the test and the `try`, so nothing can interrupt
        try:
            self._check_here()
            count, mean = token_count(tokens), mean_loss(loss)
            self._steps_run += 1
            round_ = self._role.step(count, mean)
            self._after_step()
            return round_
        finally:
            self._stepping = None

    def _after_step(self) -> None:
        """Call the callbacks. An attached peer also reports, and ends a loop that goes on when told to
        stop."""
        taken = self._role.applied
        if taken != self._told_taken:  # by this step, or by one that an error or Ctrl-C ended
            for callback in self._callbacks:
                callback(self)
            self._told_taken = taken  # only now: Ctrl-C may come within a callback
        if self._role.beside is None:
            return
        self._tell("training")
        if self.should_stop:
            if self._told_to_stop:
                raise self._role.ending()
            self._told_to_stop = True

    def on_merged(self, callback: Callable[["Peer"], object]) -> Callable[["Peer"], object]:
        """Call `callback(peer)` in the training thread, in `step`, whenever the model took over a newer Phi.

        If an error or Ctrl-C ends such a step, or one of the callbacks, the next step calls all of them.

        Returns the callback, so that this works as a decorator. Raises TypeError if it cannot be called.
        """
        if not callable(callback):
            raise TypeError(f"on_merged takes a function of the peer, not {callback!r:.60}")
        self._callbacks.append(callback)
        return callback

    def request_stop(self) -> None:
        """Ask the training loop to stop: `should_stop` is true from now on or, with several ranks, on all of
        them after their next step. Leaving the loop, in `finish` or at the end of the `with`, fulfils the
        request.

        May be called from any thread, and on any rank.
        """
        self._role.stop_requested = True

    def flush(self, timeout_s: float) -> None:
        """Before leaving: publish the next round's fragment, save a checkpoint, and wait until our last delta
        is on disk.

        Waits at most `timeout_s` seconds. What other fragments have learnt since their last deltas is not
        published.

        Raises:
            ValueError: `timeout_s` is not a number of seconds, 0 or more; nothing was published.
            RuntimeError: the peer has left, or this is a forked process.
            ConfigError: the model's parameters are not those that it attached with.
        """
        self._check_here()
        _check_seconds(timeout_s=timeout_s)
        self._role.flush(timeout_s)

    def drop_progress(self) -> None:
        """After the last round: go back to Phi, and discard what the open windows hold."""
        self._check_here()
        self._role.drop_progress()

    def settle(self) -> bool:
        """After `drop_progress`: take over Phi as it changes. Returns whether it did, or may be about to; on
        ranks other than the first, only whether it did."""
        self._check_here()
        return self._role.settle()

    def finish(self, *, quiet_s: float = 2.0, timeout_s: float = 30.0) -> bool:
        """Stop training and hold the swarm's own model, with nothing in it that is this node's alone.

        Publishes the open window of the next round's fragment, as leaving does, and follows Phi until it
        rests: nothing has changed it for `quiet_s` seconds, the daemon has stored our last delta, and it has
        nothing to merge and nothing on its way. Gives up after `timeout_s` seconds, or when the node is told
        to stop. Returns whether Phi came to rest. Nodes that have merged the same deltas then hold the same
        parameters, bit for bit. What this node has learnt since its last delta is left out if it has diverged
        or has no daemon in that time.

        Optimizers that have a mode for evaluation, as ScheduleFree has, are in it afterwards.

        Raises:
            ValueError: `quiet_s` or `timeout_s` is not a number of seconds, 0 or more; nothing was published.
            RuntimeError: the peer has left, or this is a forked process.
            ConfigError: the model's parameters are not those that it attached with.
        """
        self._check_here()
        _check_seconds(quiet_s=quiet_s, timeout_s=timeout_s)
        begun = time.monotonic()
        self._role.await_daemon(timeout_s)
        self.flush(LEAVE_S)
        self._end_training_mode()
        self.drop_progress()
        changed = time.monotonic()
        while True:
            if is_changing := self.settle():
                changed = time.monotonic()
            self._tell("finished")
            now = time.monotonic()
            rests = not is_changing and now - changed >= quiet_s
            gives_up = now - begun >= timeout_s or self.should_stop
            if done := self._role.agree_done(DONE if rests else GAVE_UP if gives_up else 0):
                return done == DONE
            time.sleep(POLL_S)

    def _end_training_mode(self) -> None:
        """Put the optimizers into eval mode. One that writes averages of its own into the model then, as
        ScheduleFree does, must not do so after the swarm's model is there."""
        for optimizer in self._optimizers:
            if callable(end := getattr(optimizer, "eval", None)):
                end()

    def report(self, report: Report) -> None:
        """Tell the daemon how training is doing."""
        self._role.report(report)

    def _tell(self, state: str) -> None:
        """Report to the daemon as an attached peer; the built-in trainer calls `report` itself."""
        if self._role.beside is not None:
            self._reporter.report(self, state)

    # -- leaving

    @property
    def has_left(self) -> bool:
        """Whether the peer has left its swarm."""
        return self._left

    @property
    def is_here(self) -> bool:
        """Whether this is the process that attached, and not one forked from it."""
        return os.getpid() == self._pid

    def _check_here(self) -> None:
        """Raise RuntimeError if nothing that the model learns from now on can reach the swarm."""
        if self._left:
            raise RuntimeError("this peer has left its swarm: attach again to go on training in it")
        if not self.is_here:
            raise RuntimeError("a peer belongs to the process that attached, not to those forked from it")

    def leave(self) -> None:
        """Publish the next round's fragment, save, and stop the daemon, as leaving the `with` does."""
        self._end(in_order=True)

    def abandon(self) -> None:
        """Save what is whole, publish nothing more, and stop the daemon, as an exception in the `with`
        does."""
        self._end(in_order=False)

    def _leave_at_exit_too(self) -> None:
        """Have `leave_at_exit` called at the end; children of multiprocessing end without atexit."""
        if multiprocessing.parent_process() is None:
            atexit.register(self.leave_at_exit)
        else:
            self._at_exit = Finalize(None, self.leave_at_exit, exitpriority=0)

    def _forget_exit(self) -> None:
        atexit.unregister(self.leave_at_exit)
        if self._at_exit is not None:
            self._at_exit.cancel()

    def leave_at_exit(self) -> None:
        """The process ends and the peer has not left: do what the end of the `with` would do, given the error
        that ends the process.

        In an interactive session no error counts: the last one that it showed may be hours old.
        """
        ended_by = getattr(sys, "last_value", None) or sys.exc_info()[1]
        error = None if hasattr(sys, "ps1") else ended_by
        try:
            self.__exit__(type(error) if error else None, error, None)
        except LocalError as found:  # no script is left for it to end
            log.error("%s", found)

    def close(self) -> None:
        """Disconnect from the daemon; an attached peer's daemon stops. Does nothing in a forked process."""
        if self.is_here and not self._is_closed:
            self._role.close()
            self._is_closed = True

    def __reduce__(self) -> NoReturn:
        """Raise TypeError: a copy cannot be the same node, in this process or another."""
        raise TypeError(
            "a Peer can be neither copied nor pickled: keep it out of objects that are, such as a model that"
            " you copy, or the dataset of a worker that is spawned"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Our own SystemExit comes to all ranks at the same step; nothing else need come to any other.
        ends_alike = kind is None or self._told_to_stop
        self._end(in_order=ends_alike or self._role.team.size == 1)

    def _end(self, *, in_order: bool) -> None:
        self._end_now(in_order)

    def _end_now(self, in_order: bool) -> None:
        if not self.is_here:
            return
        try:
            if not self._left:
                self._left = True
                self._forget_exit()
                self._hand_over(in_order)
        finally:
            self.close()  # also if the peer has left: Ctrl-C may have cut the first call short

    def _hand_over(self, in_order: bool) -> None:
        """Publish and save, or only save, unless a step is half done."""
        if in_order and self._others_step_is_over():
            self._role.flush(LEAVE_S)

    def _others_step_is_over(self) -> bool:
        """Wait up to `LEAVE_S` for another thread's step, or both would publish. Returns whether it ended."""
        deadline = time.monotonic() + LEAVE_S
        while self._stepping not in (None, get_ident()):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


def _check_seconds(**given: object) -> None:
    """Raise ValueError for what is not a number of seconds; the wait would only fail after the last delta."""
    for name, seconds in given.items():
        if not (isinstance(seconds, SupportsFloat) and float(seconds) >= 0):
            raise ValueError(f"{name} is {seconds!r:.60}: give seconds, 0 or more")
