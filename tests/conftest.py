"""What all tests share: Hypothesis profiles, and one seed for everything drawn at random.

A test that needs randomness takes the `seed` fixture (an int) or `rng` (a NumPy generator). The seed
of the run is new each time; pytest's header shows it, and so does a failure. Each test's own seed
follows from it and from the test's name, so that a single test can be replayed:

    make test ARGS="--seed 1234 -k name_of_the_test"

Hypothesis has its own: a failure prints the example and a @reproduce_failure line. For more examples:

    make test ARGS="--hypothesis-profile fuzz -k merge"
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: two torch threads in each, which spin for one another, take twice as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)

SEED = pytest.StashKey[int]()
WORKER_SEED = "gossamer_seed"
TEST_SEED = pytest.StashKey[int]()

# Deadlines would measure the machine, not the code. "ci" always runs the same examples, so that a change
# fails only for what it changed; "dev" and "fuzz" look for new ones.
_SHARED = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
}
hypothesis.settings.register_profile("dev", max_examples=50, **_SHARED)
hypothesis.settings.register_profile("ci", max_examples=100, derandomize=True, database=None, **_SHARED)
hypothesis.settings.register_profile("fuzz", max_examples=5000, **_SHARED)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed",
        type=int,
        default=None,
        help="seed of the random tests (default: a new one each time; GOSSAMER_TEST_SEED sets it too)",
    )


def pytest_configure(config: pytest.Config) -> None:
    seed = getattr(config, "workerinput", {}).get(WORKER_SEED, config.getoption("--seed"))
    if seed is None:
        text = os.environ.get("GOSSAMER_TEST_SEED", "")
        seed = int(text) if text else random.SystemRandom().randrange(2**32)
    config.stash[SEED] = seed
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are processors: many tests wait for other processes, or for time to pass."""
    return 1 + (os.cpu_count() or 1)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All processes of one run (pytest-xdist) draw from one seed."""
    node.workerinput[WORKER_SEED] = node.config.stash[SEED]


def _how_to_replay(config: pytest.Config) -> str:
    seed = config.stash[SEED]
    profile = hypothesis.settings.get_current_profile_name()
    return f'seed: {seed} (replay: make test ARGS="--seed {seed}"); hypothesis profile: {profile}'


def pytest_report_header(config: pytest.Config) -> str:
    return _how_to_replay(config)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    if exitstatus and config.get_verbosity() < 0:  # -q leaves the header out
        terminalreporter.write_line(_how_to_replay(config))
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in getattr(report, "user_properties", ()):
            if name == "said":  # for a test that does as much as time allows: how much
                terminalreporter.write_line(f"{report.nodeid}: {value}")


@pytest.fixture(autouse=True)
def _process_settings() -> Iterator[None]:
    """Undo what a daemon's or a trainer's `main`, run in a test, has set for its whole process."""
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    asyncio_log = logging.getLogger("asyncio")
    filters, level, umask = list(asyncio_log.filters), asyncio_log.level, os.umask(0o022)
    os.umask(umask)
    yield
    for number, handler in handlers.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)
    asyncio_log.filters = filters
    asyncio_log.setLevel(level)
    os.umask(umask)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """This test's seed. It follows from the run's seed and the test's name alone."""
    text = f"{request.config.stash[SEED]}/{request.node.nodeid}"
    value = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    request.node.stash[TEST_SEED] = value
    return value


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """A NumPy generator with this test's seed."""
    return np.random.default_rng(seed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Iterator[None] | pytest.TestReport:
    report: pytest.TestReport = yield
    if report.failed and TEST_SEED in item.stash:
        run_seed = item.config.stash[SEED]
        report.sections.append(
            (
                "seed",
                f"this test drew from seed {item.stash[TEST_SEED]}; replay it with\n"
                f"    .venv/bin/python -m pytest --seed {run_seed} '{item.nodeid}'",
            )
        )
    return report


@pytest.fixture
def task_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for task files; modules imported from there are forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # bytecode would hide a change within a second
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(f"{tmp_path}{os.sep}"):
            del sys.modules[name]
