"""The `gossamer` command, run in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gossamer.bootstrap.cli import main as cli


@dataclass(frozen=True, slots=True)
class Outcome:
    status: int
    out: str
    err: str

    def assert_user_error(self, *parts: str) -> None:
        """Check that it printed one line to standard error, with all `parts` in it, and did nothing else."""
        assert self.status == 2, self
        assert self.err.startswith("gossamer: ") and self.err.endswith("\n"), self
        assert self.err.count("\n") == 1, self
        for part in parts:
            assert part in self.err, (part, self.err)


Run = Callable[..., Outcome]


def in_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> Run:
    """A function that runs the command in this process, in this folder."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("GOSSAMER_HOME", str(folder / "home"))
    # The command would set log handlers, and this process is the tests' own.
    monkeypatch.setattr("gossamer.node.logs.configure", lambda **_: None)

    def run_it(*args: object) -> Outcome:
        monkeypatch.setattr("sys.argv", ["gossamer", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return Outcome(int(end.value.code or 0), captured.out, captured.err)

    return run_it


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
