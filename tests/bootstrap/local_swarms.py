"""Options to start a local swarm with, and children that have ended."""

from __future__ import annotations

from pathlib import Path

from gossamer.bootstrap.local_swarm import SwarmOptions


class Ended:
    """A child process that has ended with an exit status."""

    def __init__(self, status: int) -> None:
        self.status = status

    def poll(self) -> int:
        return self.status

    def close(self) -> None:
        pass


def options(folder: Path, json_path: Path | None = None) -> SwarmOptions:
    return SwarmOptions(
        nodes=2,
        rounds=3,
        task="text",
        options={},
        settings=(),
        data=(),
        codec="int4",
        every_steps=5,
        fragments=1,
        seed=0,
        folder=folder,
        json_path=json_path,
        plaintext=False,
        debug=False,
    )
