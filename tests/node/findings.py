"""Runs `gossamer config check` in this process, and folders and manifests for it to check."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import typer

from gossamer.bootstrap import manifests
from gossamer.bootstrap.cli import main as cli
from gossamer.bootstrap.cli.config_command import check
from gossamer.bootstrap.cli.values import Finding
from gossamer.node.home import Home
from tests.protocol import builders

INVITED = builders.manifest(admission=builders.admission())


def found(findings: Iterable[Finding]) -> dict[str, list[tuple[str, str]]]:
    """Level and text of findings, by subject."""
    by_subject: dict[str, list[tuple[str, str]]] = {}
    for finding in findings:
        assert finding.text.isprintable() and finding.text
        by_subject.setdefault(finding.subject, []).append((finding.level, finding.text))
    return by_subject


def levels(findings: Iterable[Finding]) -> dict[str, list[str]]:
    return {subject: [level for level, _ in said] for subject, said in found(findings).items()}


def look(path: Path | None, *, offline: bool = True) -> dict[str, list[tuple[str, str]]]:
    """Run the whole check; returns what it found, by subject."""
    gossamer: Any = typer.main.get_command(cli.app)
    return found(check(typer.Context(gossamer, info_name="gossamer"), path, offline))


def invited_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A node's folder in the invited swarm."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GOSSAMER_HOME", str(folder / "home"))
    made = Home(folder / "d")
    made.create()
    made.adopt(INVITED)
    return made


def errors(said: dict[str, list[tuple[str, str]]]) -> dict[str, str]:
    return {subject: text for subject, lines in said.items() for level, text in lines if level == "error"}


def founding(tmp_path: Path, **changes: Any) -> Path:
    """A manifest of a built-in task, with no other files beside it."""
    wanted = {"options": {}, "codec": "int4", "every_steps": 30, "every_seconds": 0, "seed": 0, **changes}
    manifest, _ = manifests.create(name="n", task="text", **wanted)
    manifests.write(manifest, tmp_path / "m.toml")
    return tmp_path / "m.toml"
