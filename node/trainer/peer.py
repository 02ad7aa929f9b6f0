"""`Peer`: a training loop's membership in the swarm.

A training loop calls `step` after each inner step. `step` applies what the swarm has merged, and publishes
when the pace says so. Its `Rank` does this work: of several ranks, the first leads and the others
follow.

There is one rule for every way out of the loop (its end, an exception, Ctrl-C, SIGTERM, the end of the
process): if the parameters are as at the last `step`, the open window is published and a checkpoint saved.
Otherwise something is half done, and what was saved last stays.

A stop may be asked for where the loop's next step is far away: in an evaluation of minutes, or where a worker
has been killed by the same signal. SIGTERM and `request_stop` therefore publish the open window at once, by
the same rule, since a signal's handler runs in the training thread, between two of its instructions. If the
rule says no, the next step publishes it.
"""

import atexit
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from itertools import count
from math import isfinite
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import Any, Self, SupportsFloat, SupportsInt, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from gossamer.models.task import named_tensors
from gossamer.node import logs
from gossamer.node.home import Home
from gossamer.node.ipc.messages import NOT_EVALUATED, Evaluation
from gossamer.node.options import NodeOptions
from gossamer.node.trainer.attach import DaemonProcess, StartedNode, check_process, sigterm, start_node
from gossamer.node.trainer.checkpoint import Progress
from gossamer.node.trainer.daemon_link import CONNECT_TIMEOUT_S, DaemonLink
from gossamer.node.trainer.data import DrawnShard, Schedule, Shard
from gossamer.node.trainer.outer import Leader
from gossamer.node.trainer.parameters import check_fits, checked_optimizers, parameters_of, reshard
from gossamer.node.trainer.ranks import DONE, GAVE_UP, Rank, RankContext, Team, team_of
from gossamer.protocol.errors import ConfigError, LocalError, UnreachableError
from gossamer.protocol.limits import TOKENS_MAX
from gossamer.protocol.manifest import Manifest, from_canonical

LEAVE_S = 2.0
"""How long leaving waits for the last delta to be on disk."""

EARLY_S = 0.5
"""How long publishing early waits for the delta before to be on disk: a signal's handler may be waiting."""

WARM_UP_STEPS = 20
"""Inner steps over which a fresh inner optimizer's learning rate rises to its place."""

POLL_S = 0.01
LOG_AFTER_S = 3.0
LOG_EVERY_S = 30.0

F = TypeVar("F")
T = TypeVar("T")

log = logging.getLogger("gossamer.peer")


class Peer:
    """One model's place in the swarm. Not thread-safe: it belongs to the training thread.

    A script makes one with `attach`. The built-in trainer, whose daemon the supervisor runs, uses `connect`.
    """

    _sees_changes = True
    """Whether the loop's own parameters change with those here."""

    def __init__(
        self,
        model: nn.Module,
        role: Rank,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        node: StartedNode | None = None,
    ) -> None:
        """`node` is the one that this script has started; None on ranks other than the first."""
        self.model = model
        self.contact = node.contact if node else ""
        """Where others join an attached peer's node: the first address that it advertises, or else the one
        at which this machine reaches it. Only the first rank knows it."""
        self.folder: Path | None = node.home.root if node else None
        """The folder of an attached peer's node. Only the first rank knows it."""
        self._role = role
        self._optimizers = optimizers
        self._steps_run = 0
        self._callbacks: list[Callable[[Peer], object]] = []
        self._applied = 0
        """The count of `Rank.applied` that the callbacks were last called for."""
        self._thread = get_ident()
        """The training thread."""
        self._inside: int | None = None
        """The thread that is changing what this peer holds, in `step` for example. A lock would stay taken if
        Ctrl-C came between taking it and the `try` that releases it."""
        self._has_average = False
        """Whether the averaged model is in the place of the live one."""
        self._must_publish = False
        """Whether a stop has been asked for, and the next step is to publish the open window."""
        self._has_warned_of_stop = False
        """Whether a step has ended with `should_stop`. The next one raises, on all ranks."""
        self._left = False
        self._is_closed = False
        self._pid = os.getpid()

    @classmethod
    def connect(
        cls,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        folder: Path,
        manifest: Manifest,
        *,
        stop_round: int = 0,
        extra_stop_s: float = 0.0,
    ) -> "Peer":
        """Connect to the daemon that runs in `folder`; call `begin` next.

        Args:
            model: on its device already; must fit `manifest`.
            optimizers: the inner optimizers, whose state the node's checkpoint keeps.
            stop_round: publish no round past this one; 0 for no limit.
            extra_stop_s: how long leaving may wait for the rounds of all fragments that have open windows.

        Raises UnreachableError if no daemon answers there, ConfigError if the model does not fit.
        """
        home = Home(folder)
        team = Team(dict(named_tensors(model, frozen=True)))
        context = RankContext(team, stop_round, extra_stop_s=extra_stop_s)
        link = DaemonLink(home.socket_path(), manifest)
        if not link.wait_connected(CONNECT_TIMEOUT_S):
            raise UnreachableError(
                f"no daemon has answered at {home.socket_path()} for {CONNECT_TIMEOUT_S:.0f} s"
                f" ({link.problem})"
            )
        leader = Leader(model, optimizers, manifest, link, context, home.checkpoint_path)
        return cls(model, leader, optimizers)

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
    ) -> Self:
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
        show_log()
        options = NodeOptions.of(
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
        check_process()
        if torch.is_inference_mode_enabled():
            raise ConfigError("attach outside torch.inference_mode(): tensors made in it cannot be trained")
        if isinstance(model, nn.Module):  # else `parameters_of` says what it is
            reshard(model)
        tensors = parameters_of(model)
        optimizers = checked_optimizers(optimizer, tensors)
        team = cls._team(tensors, model)
        node: StartedNode | None = None
        role: Rank | None = None
        try:
            if team.rank == 0:
                node = _started(team, options, manifest, tensors)
                role = _leader(model, optimizers, team, node)
            else:
                role = _follower(model, tensors, team, options)
            peer = cls(model, role, optimizers, node)
            peer._begin_attached(node)
            return peer
        except BaseException:  # also Ctrl-C at any point: nothing else would stop the daemon
            (role or team).close()
            raise

    @classmethod
    def _team(cls, tensors: Mapping[str, Tensor], model: nn.Module) -> Team:
        return team_of(tensors, model)

    def _begin_attached(self, node: StartedNode | None) -> None:
        """Wait for the swarm's model."""
        log_at = time.monotonic() + LOG_AFTER_S

        def on_wait() -> None:
            nonlocal log_at
            self._report_attached("joining")
            if node is not None and time.monotonic() >= log_at:
                log_at = time.monotonic() + LOG_EVERY_S
                log.info("waiting for the swarm's model: %s", node.waits_for())

        if not self.begin(on_wait):
            raise self._role.ending()
        atexit.register(self.leave_at_exit)
        sigterm.call(self._publish_soon)

    # -- where the model stands in the swarm

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
        return self._role.wait_fraction

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
        """Factor on the peak learning rate: the schedule at the swarm's tokens (see `data`).

        A fresh inner optimizer is also warmed up over `WARM_UP_STEPS` steps, since it knows nothing yet of a
        model that may be far along. Use it as ``LambdaLR(optimizer, lambda _: peer.lr_scale(schedule))``.

        Raises ValueError if the schedule returns anything but a finite factor of 0 or more.
        """
        warm_up = 1.0 if self.resumed else min(1.0, (self._steps_run + 1) / WARM_UP_STEPS)
        factor = float(schedule(self.swarm_tokens))  # some optimizers take no tensor for a rate
        if not (isfinite(factor) and factor >= 0):
            raise ValueError(f"the schedule returned {factor}: it must return a factor of 0 or more")
        return warm_up * factor

    def shard(self, dataset: Sized, *, fraction: float = 1.0) -> Sampler[int]:
        """A sampler: pass it to a `DataLoader`, with any number of workers.

        If the swarm has data that is the same on all nodes (`samples` of `manifests.describe`) and `dataset`
        is that, it draws what no node has trained on in this epoch. Otherwise, or with `fraction`, it draws
        `dataset`, or a random part of it, in this node's own order: two nodes may draw the same samples then.
        Raises ConfigError.
        """
        try:
            size = len(dataset)
        except (TypeError, NotImplementedError):  # an IterableDataset, or a DataPipe, has none
            raise ConfigError(
                f"{type(dataset).__name__} has no length: shard takes an indexed dataset. Shuffle a"
                " streaming one with a seed of this node's own, such as peer.node_id"
            ) from None
        if self._is_common(size, fraction):
            assert self._role.draws is not None
            return DrawnShard(self._role.draws, self._role.team.size)
        return Shard(
            size,
            node_id=self.node_id,
            begun_at=self.progress.steps,
            fraction=fraction,
            rank=self._role.team.rank,
            ranks=self._role.team.size,
        )

    def stream(self, files: Sequence[F], read: Callable[[F], Iterable[T]]) -> Iterator[T]:
        """What `read` yields of each file, without end, for data that comes in files or other large parts.

        If the swarm's data is these files (see `shard`; each is one of its samples, in the same order on all
        nodes), it takes those that no node has trained on in this epoch. Otherwise it takes all of them in
        this node's own order. Use it in the training process itself. Raises ConfigError.
        """
        if self._is_common(len(files), 1.0):
            assert self._role.draws is not None
            return self._role.draws.items(lambda place: read(files[place]))
        team = self._role.team
        own = Shard(
            len(files),
            node_id=self.node_id,
            begun_at=self.progress.steps,
            rank=team.rank,
            ranks=team.size,
        )
        return (item for _ in count() for place in own for item in read(files[place]))

    def _is_common(self, size: int, fraction: float) -> bool:
        """Whether data of this size is what the swarm goes through together."""
        draws = self._role.draws
        if draws is None or fraction != 1.0:
            return False
        if size == draws.samples:
            return True
        log.warning(
            "the swarm's data has %d samples, and this %d: it is drawn in this node's own order, and nothing"
            " of it is claimed",
            draws.samples,
            size,
        )
        return False

    # -- what the loop does

    def begin(self, on_wait: Callable[[], None] | None = None) -> bool:
        """Wait for the swarm's model and load it. Returns False if the node is stopping instead.

        Training waits for the network here only: no node should train from fresh weights because a peer was
        slow.
        """
        has_begun = self._role.begin(on_wait)
        self._applied = self._role.applied
        return has_begun

    def step(self, tokens: SupportsInt, loss: SupportsFloat | Tensor) -> int | None:
        """Record an inner step; apply and publish what is due. Returns the round published, if any.

        Call it once per step of the optimizer, not per micro-batch, and never between a forward pass, its
        backward pass and that step. With several ranks, every rank calls it. A window in which the model has
        diverged is dropped: the model is then the swarm's again, the inner optimizers are fresh, and the log
        says so.

        Args:
            tokens: tokens (or samples, always the same unit) that this step trained on, on this rank; a
                whole number, at least 1. Deltas are weighted by it.
            loss: the mean loss over these tokens, for displays; a tensor of one element stays on its device
                until the window closes.

        Raises:
            ValueError: `tokens` is no such count, or `loss` is not one number; the step was not recorded.
            RuntimeError: the peer has left, or `step` is running already.
            ConfigError: the model's parameters are not those that it attached with.
            UnreachableError: another rank of this node is gone.
            SystemExit: the loop went on although `should_stop` was true (attached peers only).
        """
        if self._inside is not None:
            raise RuntimeError(
                "step is already running, in another thread or around this callback: a peer has one loop"
            )
        with self._changing():
            count, mean = token_count(tokens), self._mean(loss)
            self._steps_run += 1
            round_ = self._role.step(count, mean)
            if (applied := self._role.applied) != self._applied:  # by this step, or by one that Ctrl-C ended
                for callback in self._callbacks:
                    callback(self)
                self._applied = applied  # only now: Ctrl-C may come within a callback
        if self._must_publish:
            self._publish_soon()
        self._report_attached("training")
        if self._role.daemon is not None and self.should_stop:
            if self._has_warned_of_stop:
                raise self._role.ending()
            self._has_warned_of_stop = True
        return round_

    @contextmanager
    def average(self) -> Iterator[None]:
        """Evaluate the averaged model: inside the block, it is in the place of the live one.

            with peer.average():
                loss = evaluate(model)

        It is the mean of the swarm's model over about the last fifth of its rounds, the same on every node
        that has merged the same deltas, and mostly better than the live model. The live one comes back at the
        end of the block, also after an exception or Ctrl-C; what was learnt since the last delta is in it.
        Buffers, such as running statistics, stay the live model's. With several ranks, all of them call it.
        Also works once the peer has left. Takes some time: it reads the node's folder.

        Raises:
            StorageError: it is not here yet, as shortly after joining.
            RuntimeError: in such a block already; a step inside raises it, too.
        """
        self._check_live()
        # Their modes, as ScheduleFree has them, change the parameters as they change: never the average's.
        moded: list[Any] = [
            one
            for one in self._optimizers
            if hasattr(one, "eval") and any(group.get("train_mode") for group in one.param_groups)
        ]
        with ExitStack() as undo:
            self._has_average = True
            undo.callback(setattr, self, "_has_average", False)
            for optimizer in moded:
                optimizer.eval()
                undo.callback(optimizer.train)
            undo.enter_context(self._role.averaged())
            for optimizer in moded:
                undo.callback(optimizer.eval)  # if it is not in that mode any more
            yield

    def on_merged(self, callback: Callable[["Peer"], object]) -> Callable[["Peer"], object]:
        """Call `callback(peer)` in the training thread, in `step`, whenever the model took over a newer Phi.

        If an error or Ctrl-C ends such a step, or one of the callbacks, the next step calls all of them.

        Returns the callback, so that this works as a decorator. Raises TypeError if it cannot be called.
        """
        if not callable(callback):
            raise TypeError(f"on_merged takes a function of the peer, not {callback!r:.60}")
        self._callbacks.append(callback)
        return callback

    def _mean(self, loss: Any) -> float | Tensor:
        return mean_loss(loss)

    def request_stop(self) -> None:
        """Ask the training loop to stop: `should_stop` is true from now on or, with several ranks, on all of
        them after their next step. Leaving the loop, in `finish` or at the end of the `with`, fulfils the
        request. The open window is published at once, or by the next step, as at SIGTERM.

        May be called from any thread, in a signal's handler, and on any rank.
        """
        self._role.stop_requested = True
        self._publish_soon()

    def drop_progress(self) -> None:
        """After the last round: go back to Phi, and discard what the open windows hold."""
        with self._changing():
            self._role.drop_progress()

    def settle(self) -> bool:
        """After `drop_progress`: take over Phi as it changes. Returns whether it did, or may be about to; on
        ranks other than the first, only whether it did."""
        with self._changing():
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
            RuntimeError: the peer has left.
            ConfigError: the model's parameters are not those that it attached with.
        """
        gives_up_at = time.monotonic() + float(timeout_s)
        rests_after = float(quiet_s)  # what is no number is refused before anything is published
        with self._changing():
            self._role.await_daemon(timeout_s)
            self._role.flush(LEAVE_S)
            for optimizer in self._optimizers:
                # One that writes averages into the model must not do so once the swarm's is there.
                if callable(end := getattr(optimizer, "eval", None)):
                    end()
            self._role.drop_progress()
        changed = time.monotonic()
        while True:
            is_changing = self.settle()
            self._report_attached("finished")
            now = time.monotonic()
            changed = now if is_changing else changed
            rests = not is_changing and now - changed >= rests_after
            gives_up = now >= gives_up_at or self.should_stop
            if done := self._role.agree_done(DONE if rests else GAVE_UP if gives_up else 0):
                return done == DONE
            time.sleep(POLL_S)

    def report(self, state: str, evaluation: Evaluation = NOT_EVALUATED) -> None:
        """Tell the daemon how training is doing, for peers and displays: twice a second at most."""
        self._role.report(state, evaluation)

    def _report_attached(self, state: str) -> None:
        """Report as an attached peer; the built-in trainer calls `report` itself."""
        if self._role.daemon is not None:
            self._role.report(state)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Inside, this thread changes what the peer holds. Raises RuntimeError if the peer has left."""
        if self._left:
            raise RuntimeError("this peer has left its swarm: attach again to go on training in it")
        self._check_live()
        self._thread = self._inside = get_ident()
        try:
            yield
        finally:
            self._inside = None

    def _check_live(self) -> None:
        if self._has_average:
            raise RuntimeError("the averaged model is in the place of the live one: end the block first")

    def _publish_soon(self) -> None:
        """Publish the open window now, if this is the training thread and the parameters are as at its last
        step; otherwise the next step does it. Does nothing in a forked process."""
        if self._left or os.getpid() != self._pid:
            return
        was_due, self._must_publish = self._must_publish, True
        is_free = self._inside is None and not self._has_average and self._sees_changes
        if is_free and get_ident() == self._thread:
            with self._changing():
                self._must_publish = not self._role.publish_early(EARLY_S)
        if self._must_publish and not was_due and self._role.team.rank == 0:
            log.info("asked to stop: what this node has learnt is published once its next step is done")

    # -- leaving

    def leave(self) -> None:
        """Publish the next round's fragment, save, and stop the daemon, as leaving the `with` does. With
        several ranks, all of them call it."""
        self._end(together=True)

    def abandon(self) -> None:
        """Leave as an exception in the `with` does: with several ranks, of which the others may be anywhere,
        nothing is published or saved."""
        self._end(together=False)

    def leave_at_exit(self) -> None:
        """The process ends and the peer has not left: do what an exception in the `with` would do."""
        try:
            self.abandon()
        except LocalError as error:  # no script is left for it to end
            log.error("%s", error)

    def close(self) -> None:
        """Disconnect from the daemon; an attached peer's daemon stops. Does nothing in a forked process."""
        if os.getpid() == self._pid and not self._is_closed:
            self._role.close()
            self._is_closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Our own SystemExit comes to all ranks at the same step.
        self._end(together=kind is None or self._has_warned_of_stop)

    def _end(self, *, together: bool) -> None:
        """Leave. Who leaves while another thread is in a step publishes nothing: both would write one
        payload."""
        if os.getpid() != self._pid:
            return
        try:
            if not self._left:
                self._left = True
                atexit.unregister(self.leave_at_exit)
                sigterm.forget(self._publish_soon)
                is_between_steps = self._inside in (None, get_ident())
                if (together or self._role.team.size == 1) and is_between_steps:
                    self._role.flush(LEAVE_S)
        finally:
            self.close()  # also if the peer has left: Ctrl-C may have cut the first call short


# --- Attaching: of several ranks, the first starts the node and tells the others.


def _started(
    team: Team,
    options: NodeOptions,
    manifest: Manifest | str | os.PathLike[str] | None,
    tensors: Mapping[str, Tensor],
) -> StartedNode:
    """Start the node, and tell the other ranks of it, which wait in `_follower`."""

    def in_full(manifest: Manifest) -> Mapping[str, Tensor]:
        team.share(b"=" + manifest.canonical())
        return team.bind(manifest.plan())

    try:
        node = start_node(options, manifest, tensors, in_full)
        team.share(b"=" + node.link.node_id)
        return node
    except BaseException as error:
        problem = str(error) if isinstance(error, LocalError) else f"the first rank failed: {error!r}"
        team.share(b"!" + problem.encode())
        raise


def _leader(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], team: Team, node: StartedNode
) -> Leader:
    try:
        context = RankContext(team, node.options.stop_round, node.daemon)
        return Leader(model, optimizers, node.manifest, node.link, context, node.home.checkpoint_path)
    except BaseException:  # such as no memory for the outer loop, or Ctrl-C
        node.close()
        raise


def _follower(model: nn.Module, tensors: Mapping[str, Tensor], team: Team, options: NodeOptions) -> Rank:
    """Take part in what the first rank does. Raises ConfigError if it failed."""

    def from_first() -> bytes:
        message = team.share(b"")
        if message[:1] == b"!":
            raise ConfigError(message[1:].decode())
        return message[1:]

    manifest = from_canonical(from_first())
    check_fits(tensors, manifest)
    team.bind(manifest.plan())
    node_id, daemon = from_first(), DaemonProcess()
    daemon.start()
    return Rank(model, manifest, node_id, RankContext(team, options.stop_round, daemon))


def show_log() -> None:
    """Show our log on standard error, unless the script has set up logging itself, or does so later."""
    ours = logging.getLogger("gossamer")
    if logging.getLogger().handlers or ours.handlers:
        return
    handler = logs.handler()
    handler.addFilter(lambda _: not logging.getLogger().handlers and ours.handlers == [handler])
    ours.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.INFO)


# --- What a training loop passes to `step`, checked.


def token_count(tokens: SupportsInt) -> int:
    """A step's tokens as an int, from any type of number. Raises ValueError if it is not a valid count."""
    try:
        count = int(tokens)
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
    try:
        return loss.detach().view(()) if isinstance(loss, Tensor) else float(loss)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        found = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r:.60}"
        raise ValueError(
            f"loss is {found}: step takes the step's mean loss, one number, or float('nan') if there is none"
        ) from None
