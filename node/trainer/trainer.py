"""The built-in trainer: runs a task's inner loop as one peer of the swarm.

The supervisor starts it beside its daemon as ``python -m gossamer.node.trainer.trainer``. A user's own
script with a `Peer` takes the same place.

A mistake in a task that shows before the first step is for a person to fix: the exit status is 2, and the
node stops. An error that comes later may pass (a file out of reach, another process that took the memory),
and so may what keeps a daemon from answering: the exit status is 1, and the trainer is started again, with
pauses, for as long as it takes, while the daemon goes on.
"""

import atexit
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from math import isfinite
from typing import NoReturn

import torch
from torch import nn

from gossamer.models import TaskError
from gossamer.models.muon import InnerOptimizer
from gossamer.models.task import DataStream, Task
from gossamer.models.task_file import task_errors
from gossamer.node import logs, processes
from gossamer.node.home import Home
from gossamer.node.ipc.messages import NOT_EVALUATED, Evaluation
from gossamer.node.options import NodeOptions
from gossamer.node.trainer.data import build_task
from gossamer.node.trainer.peer import Peer
from gossamer.protocol.errors import ConfigError, FolderGoneError, LocalError, StorageError, UnreachableError
from gossamer.protocol.manifest import Manifest

READING_MAX = 0.1
"""How much of the training time reading the averaged model may take. It merges the rounds since the newest
snapshot again, which takes a minute for a large model."""

LEAVE_S = 2.0
STAY_POLL_S = 0.05
END_S = 10.0
"""How long a task's leftovers, such as a thread of its own, may keep the process alive after its end."""

log = logging.getLogger("gossamer.trainer")


def choose_device(name: str) -> torch.device:
    """The device of that name; `auto` is CUDA if available, else the CPU. Raises ConfigError."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
        torch.zeros(1, device=device).cpu()  # fails on "meta"
    except (RuntimeError, AssertionError, ImportError) as error:  # ImportError: a backend's own package
        reason = str(error).splitlines()[0].split(". ")[0]  # torch goes on to list all devices it knows
        raise ConfigError(f"device {name!r} cannot be used: {reason}") from None
    return device


class Trainer:
    """Task, model and optimizer of one node, and its peer."""

    def __init__(self, options: NodeOptions, manifest: Manifest) -> None:
        if options.threads:
            torch.set_num_threads(options.threads)
        self._options = options
        self._manifest = manifest
        self._device = choose_device(options.device)
        self._task: Task = build_task(Home(options.root), manifest, options.data)
        self._model: nn.Module = self._task.build_model(manifest.task.seed).to(self._device)
        self._optimizer = InnerOptimizer(self._task.build_optimizer(self._model))
        if options.check:
            next(self._task.batches(DataStream(seed=manifest.task.seed, node_id=bytes(32))))
            log.info("can train on %s", self._task.data_in_words())
            return
        self.peer = Peer.connect(
            self._model,
            self._optimizer.parts,
            options.root,
            manifest,
            stop_round=options.stop_round,
            extra_stop_s=options.extra_stop_s,
        )
        self._state = "joining"
        self._evaluation = NOT_EVALUATED
        self._average_due = 0.0
        """When reading the averaged model has become a small part of the time since."""
        self.stepped = False
        """Whether this process has done an inner step, so that the task works in principle."""

    def run(self) -> None:
        """Train until the last round or until asked to stop. Raises TaskError."""
        stream = DataStream(seed=self._manifest.task.seed, node_id=self.peer.node_id)
        next(self._task.batches(stream))  # mistakes in the data come to light before anyone waits
        log.info("training on %s", self._task.data_in_words())
        if not self.peer.begin(on_wait=self._report):
            return
        if self.peer.progress.steps:
            afresh = "" if self.peer.resumed else ", with a fresh inner optimizer"
            log.info("resumed after %d inner steps%s", self.peer.progress.steps, afresh)
        steps = self.peer.progress.steps
        # A task that uses torch's own generator draws other numbers on each node and after each restart.
        torch.manual_seed(stream.derived_seed(f"torch after {steps} steps"))
        batches = self._task.batches(replace(stream, skip_batches=steps, samples=self._samples()))
        if self.peer.clock == 0 and self._options.evaluate_every:
            loss = self._held_out_loss()  # the averaged model is Phi_0, too
            self._evaluation = Evaluation(loss, loss, loss, self.peer.version, self.peer.round)
        self._state = "training"
        while not self.peer.should_stop and not self.peer.finished:
            self._inner_step(next(batches))
            self._report()
        if self.peer.finished:
            self._stay()
        self._state = "leaving"
        self.peer.leave()

    def _samples(self) -> Iterator[int] | None:
        """What to draw of the data that the whole swarm goes through; None if this node's is not that."""
        data = self._manifest.data
        if not data.blocks:
            return None
        found = self._task.shared_data()
        if found != (data.samples, data.digest):
            log.warning(
                "this node's data is not the swarm's (%d samples, not %d, or other ones): it is drawn in an"
                " order of its own, and nothing of it is claimed",
                found[0],
                data.samples,
            )
            return None
        return self.peer.stream(range(data.samples), lambda sample: (sample,))

    def _inner_step(self, batch: object) -> None:
        self._optimizer.scale_lr(self.peer.lr_scale(self._task.lr_scale))
        loss = self._task.loss(self._model, batch)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        tokens = self._task.tokens(batch)
        self.stepped = True
        before = self.peer.round
        published = self.peer.step(tokens, loss)
        every = self._options.evaluate_every
        if published is not None and every and published // every > before // every:  # rounds may be skipped
            if not self.peer.finished:
                self._evaluate()

    def _evaluate(self) -> None:
        """Measure the held-out losses of the live and of the averaged model, for displays."""
        live, average = self._held_out_loss(), None
        begun = time.monotonic()
        if begun >= self._average_due or self.peer.finished:
            try:
                with self.peer.average():
                    self._average_due = begun + (time.monotonic() - begun) / READING_MAX
                    average = self._held_out_loss()
            except StorageError as error:
                log.debug("only the live model was evaluated: %s", error)
        self._evaluation = self._evaluation._replace(
            val_loss=live, val_loss_average=average, version=self.peer.version, round=self.peer.round
        )

    def _held_out_loss(self) -> float | None:
        """That of the model as it is; None if it is not finite, as that cannot be shown."""
        measured = float(self._task.evaluate(self._model))
        if isfinite(measured):
            return measured
        log.warning("the held-out loss is %s, so none is shown: has training diverged?", measured)
        return None

    def _stay(self) -> None:
        """After the last round: follow Phi until told to stop, and evaluate it once it rests after a
        change."""
        self._state = "finished"
        self.peer.drop_progress()
        stale = True
        while not self.peer.should_stop:
            if self.peer.settle():
                stale = True
            elif stale:
                self._evaluate()
                stale = False
            self._report()
            time.sleep(STAY_POLL_S)

    def _report(self) -> None:
        self.peer.report(self._state, self._evaluation)


class _Ending:
    """Ends the process from a signal or a cut lifeline, whether its loop has begun or not."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self._pid = os.getpid()

    def terminate(self, number: int = signal.SIGTERM, _: object = None) -> None:
        """A signal to stop: after the current step, or at once if the loop has not begun."""
        if os.getpid() != self._pid:  # a process that the task has forked: it has no loop to stop
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if self.trainer is None:
            os._exit(0)
        self.trainer.peer.request_stop()

    def node_is_gone(self) -> None:
        """The supervisor is gone: stop, by force if a step takes too long."""
        self.terminate()
        time.sleep(LEAVE_S)
        os._exit(1)


def main() -> int:
    """Run a trainer from its one JSON argument; returns its exit status."""
    atexit.register(gc.freeze)  # with torch loaded, the last garbage collection takes up to a second
    options = NodeOptions.model_validate_json(sys.argv[1])
    logs.configure(level=options.log_level, debug=options.debug, as_json=options.log_json)
    ending = _Ending()
    for number in processes.stop_signals():
        signal.signal(number, ending.terminate)
    processes.reset_signals()
    processes.watch(ending.node_is_gone)
    try:
        with task_errors():
            trainer = ending.trainer = Trainer(options, Home(options.root).own_manifest())
            if options.check:
                return processes.DONE
            trainer.run()
        trainer.peer.close()
    except Exception as error:
        if ending.trainer is not None:
            ending.trainer.peer.abandon()  # the next process resumes from what is whole here
        if not isinstance(error, LocalError | TaskError):
            raise
        log.error("%s", error, exc_info=error if options.debug else None)
        if isinstance(error, TaskError):  # it may pass if the task has worked before
            may_pass = options.restarted or (ending.trainer is not None and ending.trainer.stepped)
        else:
            may_pass = isinstance(error, UnreachableError | FolderGoneError)
        return processes.FAILED if may_pass else processes.USER_ERROR
    if trainer.peer.is_outdated:
        return processes.FAILED  # the next process is of the daemon's release
    return processes.DONE


def _run() -> NoReturn:
    status = processes.FAILED
    try:
        status = main()
    finally:
        processes.end_within(END_S, status)
    sys.exit(status)


if __name__ == "__main__":
    _run()
