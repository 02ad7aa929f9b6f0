"""Trainers of several ranks: each of two nodes is a torchrun of two gloo processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from tests.net.processes import processes_naming, wait_for
from tests.net.scripts import PATIENCE_S, Scripts, scripts_in

pytestmark = pytest.mark.slow

RANKS = 2


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_nodes_of_two_ranks_end_with_the_same_bits(tmp_path: Path, how: str) -> None:
    with scripts_in(tmp_path) as scripts:
        scripts.start("one", RANKS, how=how)
        address = scripts.address("one")
        scripts.start("two", RANKS, how=how, join=[address])
        for name in ("one", "two"):
            scripts.wait_rounds(name, 8)
        (tmp_path / "stop").touch()
        results = [*scripts.results("one", RANKS), *scripts.results("two", RANKS)]
        assert all(result["rests"] for result in results)
        assert len({result["digest"] for result in results}) == 1
        averages = {result["average"] for result in results}
        assert len(averages) == 1 and results[0]["digest"] not in averages
        assert len({result["node_id"] for result in results}) == 2
        for first, second in (results[:2], results[2:]):
            assert first["merged"] == second["merged"] and first["merged"]
            assert first["losses"] == second["losses"] and any(first["losses"]), "a loop may branch on them"
            same = ("round", "clock", "swarm_tokens", "tokens", "steps", "loss", "version", "links")
            assert [first["metrics"][key] for key in same] == [second["metrics"][key] for key in same]
            metrics = first["metrics"]
            assert metrics["tokens"] == RANKS * 16 * metrics["steps"], "tokens of all ranks count"


def train_and_stop(scripts: Scripts) -> None:
    """A node of several ranks publishes, and all of them are sent SIGTERM."""
    scripts.start("one", RANKS, how="ddp")
    scripts.wait_rounds("one", 1)
    scripts.processes["one"].send_signal(signal.SIGTERM)
    scripts.processes["one"].wait(60)


def test_sigterm_to_all_ranks_ends_them_at_the_same_step(tmp_path: Path) -> None:
    with scripts_in(tmp_path) as scripts:
        train_and_stop(scripts)
        assert (tmp_path / "one.1.json").exists(), scripts.log("one")


def test_a_node_goes_on_with_more_ranks_and_says_what_begins_afresh(tmp_path: Path) -> None:
    with scripts_in(tmp_path) as scripts:
        train_and_stop(scripts)
        assert "the inner optimizer's state is not kept" not in scripts.log("one"), "there is none yet"
        before = json.loads((tmp_path / "one.1.json").read_text())["metrics"]
        scripts.start("one", RANKS + 1, how="ddp")
        scripts.wait_rounds("one", 1)
        (tmp_path / "stop").touch()
        results = scripts.results("one", RANKS + 1)
        assert len({result["digest"] for result in results}) == 1
        assert all(result["metrics"]["steps"] > before["steps"] for result in results)
        assert all(result["metrics"]["round"] > before["round"] for result in results)
        assert "with several ranks, the inner optimizer's state is not kept" in scripts.log("one")


def rank(scripts: Scripts, name: str, number: int) -> psutil.Process:
    """The process of one rank, which is not yet there at once."""

    def found() -> psutil.Process | None:
        for process in processes_naming(scripts.base / name):
            if process.environ().get("RANK") == str(number) and "tests.net.attached" in process.cmdline():
                return process
        return None

    return wait_for(found, PATIENCE_S, f"rank {number} of {name}")


def test_a_rank_that_asks_to_stop_ends_all_of_them_at_the_same_step(tmp_path: Path) -> None:
    with scripts_in(tmp_path) as scripts:
        scripts.start("one", RANKS, how="ddp", leaves_at=2, politely=True)
        first, second = scripts.results("one", RANKS)
        assert first["rests"] and second["rests"], (
            "asking to stop is not being told to: the swarm is waited for"
        )
        assert first["digest"] == second["digest"]
        assert first["metrics"]["steps"] == second["metrics"]["steps"]


def test_a_loop_that_goes_on_without_another_rank_is_told_so(tmp_path: Path) -> None:
    with scripts_in(tmp_path) as scripts:
        scripts.start("one", RANKS, how="alike", leaves_at=2, stubborn=True)
        assert scripts.processes["one"].wait(PATIENCE_S) == 1
        said = scripts.log("one")
        assert "ConfigError: another rank of this node has left its training loop" in said


def test_a_rank_that_is_killed_ends_the_others_in_words(tmp_path: Path) -> None:
    with scripts_in(tmp_path) as scripts:
        scripts.start("one", RANKS, how="alike")
        scripts.wait_rounds("one", 1)
        rank(scripts, "one", 1).kill()
        assert scripts.processes["one"].wait(PATIENCE_S) == 1
        assert (
            "UnreachableError: cannot reach the other ranks of this node: if one of them ended"
            in scripts.log("one")
        )
