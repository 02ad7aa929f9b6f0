"""`gossamer swarm`: a local swarm of real node processes, from manifest to summary.

It has a bootstrap peer and N nodes with their own keys, folders and ports, joined exactly as on separate
machines.
"""

import asyncio
import json
import shutil
import tempfile
from pathlib import Path

from gossamer.bootstrap import manifests
from gossamer.bootstrap.display import Output, show_summary
from gossamer.bootstrap.local_swarm import LocalSwarm, SwarmOptions
from gossamer.bootstrap.result_file import ResultFile
from gossamer.models.corpus import load_corpus
from gossamer.models.errors import TaskError
from gossamer.models.registry import OptionValue, find_kind
from gossamer.node import exit_status
from gossamer.node.storage.chunkstore import ChunkStore
from gossamer.node.storage.home import Home
from gossamer.node.training import genesis
from gossamer.protocol.errors import ConfigError, LocalError, StorageError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.manifest import Manifest


def run_swarm(options: SwarmOptions) -> int:
    """Run and show a swarm; returns 0 only if all went well. Raises LocalError for what a person can fix."""
    result = ResultFile(options.json_path) if options.json_path is not None else None
    console = Output(stderr=result is not None and result.is_stdout)
    manifest, phi = _plan(options)
    folder, is_temporary = _folder(options)
    try:
        boot = Home(folder / "bootstrap")
        boot.create()
        boot.adopt(manifest)
        genesis.store(phi, ChunkStore(boot.chunks_path), boot.chunks_path)
        manifests.write(manifest, folder / "swarm.toml", replace=True)
        try:
            summary = asyncio.run(LocalSwarm(options, manifest, folder, console).run())
        except LocalError:
            is_temporary &= not any(folder.glob("*.log"))  # the message may point to a log in there
            raise
        try:  # the run is over: if writing the result fails, the summary is still shown
            if result is not None:
                result.write(json.dumps(summary.to_json(), indent=2).encode() + b"\n")
        finally:
            show_summary(console, summary)
            if not is_temporary:
                where = f"The nodes' folders are in {folder}"
                console.print(where, highlight=False, markup=False, soft_wrap=True)
        return exit_status.DONE if summary.ok else exit_status.FAILED
    finally:
        if is_temporary:
            shutil.rmtree(folder, ignore_errors=True)


def _plan(options: SwarmOptions) -> tuple[Manifest, Ints]:
    """The manifest for this run, and Phi_0. Raises ConfigError."""
    for path in options.data:
        if not Path(path).exists():
            raise ConfigError(f"--data {path}: no such file or folder")

    return manifests.create(
        name="local",
        task=options.task,
        options={**_text_options(options), **options.options} if options.task == "text" else options.options,
        settings=options.settings,
        data=[Path(path) for path in options.data],
        codec=options.codec,
        every_steps=options.every_steps,
        every_seconds=0.0,
        fragments=options.fragments,
        seed=options.seed,
    )


def _text_options(options: SwarmOptions) -> dict[str, OptionValue]:
    """A learning rate schedule that ends with the run. Raises ConfigError, also for data that is not text."""
    try:
        kind = find_kind("text")
        task = kind.resolve({**options.options, **kind.read(options.settings)})
        load_corpus([Path(path) for path in options.data], int(task["context"]))
    except TaskError as error:
        raise ConfigError(str(error)) from None
    steps = options.rounds * options.every_steps / options.fragments * options.nodes
    tokens = int(steps * int(task["batch_size"]) * int(task["context"]))
    return {"horizon_tokens": tokens}


def _folder(options: SwarmOptions) -> tuple[Path, bool]:
    """Where the nodes live, and whether to remove it afterwards. Raises ConfigError or StorageError."""
    if options.folder is None:
        return Path(tempfile.mkdtemp(prefix="gossamer-swarm-")), True
    folder = options.folder.absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if any(folder.iterdir()):
            raise ConfigError(f"--dir {folder} is not empty; choose a new folder")
    except OSError as error:
        raise StorageError(f"--dir {folder}: {error.strerror}") from None
    return folder, False
