"""`gossamer swarm`: a local swarm of real node processes, from manifest to summary.

It has a bootstrap peer and N nodes with their own keys, folders and ports, joined exactly as on separate
machines. After the last round, nodes stop training and exchange what is still under way; only then are their
digests compared. If a node dies on the way, that is shown, and the others go on without it.
"""

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from rich.console import Console

from gossamer.bootstrap import manifests
from gossamer.bootstrap.live_table import Display, Output, show_summary
from gossamer.bootstrap.processes import NodeProcess, stop_all
from gossamer.bootstrap.summary import SwarmSummary, check_result_path, summarise, write_result
from gossamer.models import TaskError
from gossamer.models.corpus import load_corpus
from gossamer.models.registry import find_kind
from gossamer.node import processes as exit_status
from gossamer.node.daemon.storage.chunks import ChunkStore
from gossamer.node.home import Home
from gossamer.node.processes import reset_signals, stop_signals
from gossamer.node.trainer import genesis
from gossamer.protocol.errors import ConfigError, LocalError
from gossamer.protocol.manifest import Manifest

REFRESH_S = 0.5
EXCHANGE_DEADLINE_S = 60.0
"""Time after the last round for late deltas to reach all nodes."""

EVALUATIONS = 16


EVERY_STEPS = 30
"""Inner steps in a window: fixed, so that a number of rounds says how long a swarm trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmOptions:
    """What was asked for on the command line."""

    nodes: int
    rounds: int
    task: str = "text"
    """The name of a task that comes with Gossamer, or ``FILE.py:CLASS``."""
    settings: Sequence[str] = ()
    """The task's options, each ``key=value``."""
    data: Sequence[Path] = ()
    codec: str = "int4"
    every_steps: int = EVERY_STEPS
    fragments: int = 1
    seed: int = 0
    folder: Path | None = None
    json_path: Path | None = None
    plaintext: bool = False
    debug: bool = False


class LocalSwarm:
    """A bootstrap peer and the nodes that join it."""

    def __init__(
        self, options: SwarmOptions, manifest: Manifest, folder: Path, console: Console | None = None
    ) -> None:
        self.options = options
        self._manifest = manifest
        self._folder = folder
        self._console = console or Output()
        self.up_to: int | None = None
        """A round up to which the nodes are asked for a digest of their records."""
        self._starts: set[float] = set()
        """Losses measured before any node had trained; often only one node has measured any."""
        self.boot = self._process("bootstrap", ["bootstrap", str(folder / "swarm.toml")])
        self.nodes = [self.node(f"node-{i + 1}") for i in range(options.nodes)]

    @property
    def _everyone(self) -> list[NodeProcess]:
        return [self.boot, *self.nodes]

    @property
    def _left(self) -> list[NodeProcess]:
        """The nodes that have not ended."""
        return [process for process in self.nodes if not process.ended]

    def _process(self, name: str, args: list[str]) -> NodeProcess:
        args += ["--dir", str(self._folder / name), "--name", name, "--listen", "127.0.0.1:0"]
        args += ["--insecure-plaintext"] if self.options.plaintext else []
        args += ["--debug"] if self.options.debug else []
        return NodeProcess(name, self._folder / name, args)

    def node(self, name: str) -> NodeProcess:
        """A node of this swarm, not yet started."""
        options = self.options
        args = ["node", "--swarm-id", self._manifest.swarm_id.hex(), "--rounds", str(options.rounds)]
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        args += ["--threads", str(max(1, cores // options.nodes)), "--device", "cpu"]
        args += ["--evaluate-every", str(max(1, options.rounds // EVALUATIONS))]
        args += ["--task", options.task] if self._manifest.task.source else []
        for path in options.data:
            args += ["--data", str(path.absolute())]
        return self._process(name, args)

    async def run(self) -> SwarmSummary:
        """Start, watch, wait for agreement, and in any case stop everything."""
        loop = asyncio.get_running_loop()
        begun = monotonic()
        work = asyncio.create_task(self._work())

        for number in stop_signals():
            loop.add_signal_handler(number, work.cancel)
        reset_signals()
        try:
            await work
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        finally:
            await asyncio.to_thread(stop_all, self._everyone)
        wall_s = round(monotonic() - begun, 2)
        return summarise(
            [process.status for process in self.nodes if process.status is not None],
            starts=self._starts,
            ended=[f"{process.name}: {process.ended}" for process in self._everyone if process.ended],
            wall_s=wall_s,
            rounds=self.options.rounds,
            parameters=self._manifest.plan().numel,
            codec=self.options.codec,
        )

    async def _work(self) -> None:
        """Everything between the first process and the last; may be cancelled anywhere."""
        title = (
            f"gossamer swarm {self._manifest.swarm_id.hex()[:12]}: {len(self.nodes)} nodes,"
            f" {self._manifest.plan().numel / 1e6:.2f} M parameters, {self.options.codec}"
        )
        with Display(self._console, self.options.rounds, title) as display:
            display.update(self._everyone, "starting")
            await self.start()
            await self._watch(display, "training", self.is_over, inf)
            await self._watch(display, "exchanging", self._all_agree, EXCHANGE_DEADLINE_S)

    async def start(self) -> None:
        """Start the bootstrap peer, and then the nodes, which join it."""
        self.boot.start()
        address = await self.boot.address()
        for process in self.nodes:
            process.args += ["--join", address]
            process.start()

    async def _watch(
        self, display: Display, phase: str, is_over: Callable[[], bool], deadline_s: float
    ) -> None:
        """Refresh statuses and the display until `is_over`, or for at most `deadline_s`."""
        begun = monotonic()
        while not is_over():
            self._check(display)
            await asyncio.gather(
                *(
                    process.ask(digest=True, up_to=self.up_to, plaintext=self.options.plaintext)
                    for process in self._everyone
                )
            )
            self._starts.update(s for p in self.nodes if (s := p.trainer.get("val_loss_start")) is not None)
            self.refreshed(display)
            display.update(self._everyone, phase)
            if monotonic() - begun > deadline_s:
                return
            await asyncio.sleep(REFRESH_S)

    def refreshed(self, display: Display) -> None:
        """Called each time all statuses have been refreshed."""

    def _check(self, display: Display) -> None:
        """Show which processes have ended, and what the logs say went wrong.

        Raises LocalError if no node is left that can train: they need the model from the bootstrap peer, and
        a trainer that does not keep ending.
        """
        for process in self._everyone:
            if process.has_ended():
                if not self._left:
                    raise LocalError(f"{process.name} ended, and no node is left: {process.ended}")
                has_model = any(p.status and p.status["state"] != "joining" for p in self._left)
                if self.boot.ended and not has_model:
                    raise LocalError(f"bootstrap ended before any node had the model: {self.boot.ended}")
                display.tell(f"{process.name} ended; the others continue: {process.ended}")
            for text in process.troubles():
                display.tell(f"{process.name}: {text} ({process.log_path})")

    def is_over(self) -> bool:
        """Whether all nodes that have not ended have trained to the last round."""
        return all(process.status and process.status["state"] == "finished" for process in self._left)

    def _all_agree(self) -> bool:
        """Whether all have merged the same records, and all they have, and have evaluated the result.

        Their ledgers may differ: one that joined late has no records of the rounds in its first snapshot.
        """
        statuses = [process.status or {} for process in self._left]
        if not all("phi_digest" in status for status in statuses):
            return False
        are_busy = any(status["rounds_behind"] or status["payloads_missing"] for status in statuses)
        have_evaluated = all(p.trainer.get("val_version") == (p.status or {})["version"] for p in self._left)
        return len({status["merged_digest"] for status in statuses}) == 1 and not are_busy and have_evaluated


def run_swarm(options: SwarmOptions) -> int:
    """Run and show a swarm; returns 0 only if all went well. Raises LocalError for what a person can fix."""
    result = options.json_path
    if result is not None:
        check_result_path(result)
    console = Output()
    with founded(options) as (manifest, folder):
        summary = asyncio.run(LocalSwarm(options, manifest, folder, console).run())
        try:  # the run is over: if writing the result fails, the summary is still shown
            if result is not None:
                write_result(result, summary)
        finally:
            show_summary(console, summary)
            if options.folder is not None:
                where = f"The nodes' folders are in {folder}"
                console.print(where, highlight=False, markup=False, soft_wrap=True)
    return exit_status.DONE if summary.ok else exit_status.FAILED


@contextmanager
def founded(options: SwarmOptions) -> Iterator[tuple[Manifest, Path]]:
    """A manifest, and a folder with the bootstrap peer's folder and ``swarm.toml`` in it. Raises LocalError.

    A temporary folder is removed afterwards, unless a LocalError may point to a log in it.
    """
    if options.task == "text":
        _check_text(options)
    manifest, phi = manifests.create(
        name="local",
        task=options.task,
        settings=options.settings,
        data=options.data,
        codec=options.codec,
        every_steps=options.every_steps,
        fragments=options.fragments,
        seed=options.seed,
    )
    folder = options.folder.absolute() if options.folder else Path(tempfile.mkdtemp(prefix="gossamer-swarm-"))
    is_needed = options.folder is not None
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if any(folder.iterdir()):
            raise ConfigError(f"--dir {folder} is not empty; choose a new folder")
        boot = Home(folder / "bootstrap")
        boot.create()
        boot.adopt(manifest)
        genesis.store(phi, ChunkStore(boot.chunks_path), boot.chunks_path)
        manifests.write(manifest, folder / "swarm.toml", replace=True)
        yield manifest, folder
    except LocalError:
        is_needed |= any(folder.glob("*.log"))
        raise
    finally:
        if not is_needed:
            shutil.rmtree(folder, ignore_errors=True)


def _check_text(options: SwarmOptions) -> None:
    """Raise ConfigError for data that is not text, before any process starts."""
    try:
        kind = find_kind("text")
        task: Any = kind.resolve(kind.read(options.settings))
        load_corpus(options.data, int(task["context"]))
    except TaskError as error:
        raise ConfigError(str(error)) from None
