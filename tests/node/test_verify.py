"""Whether replicas hold the same model: the proof, and what is no comparison."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable

import pytest

from gossamer.node import verify
from gossamer.protocol.errors import ConfigError, UnreachableError
from tests.node.wires import answering

Answer = Callable[[], bytes]


class Replica:
    """What a node answers, one status after another; the last one for ever."""

    def __init__(self, name: str, *states: tuple[str, ...] | None, swarm: str = "s") -> None:
        self.name = name
        self.swarm = swarm
        self.states = list(states)

    def __call__(self) -> bytes:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        status = {"swarm_id": self.swarm, "node_id": self.name, "records": 3, "clock": 2}
        if state is not None:
            keys = ("merged_digest", "phi_digest", "average_digest", "average_round")
            status |= dict(zip(keys, state, strict=False))
        return json.dumps(status).encode()


async def verdict(*replicas: Answer, wait_s: float = 60.0) -> verify.Verdict:
    async with contextlib.AsyncExitStack() as stack:
        addresses = [await stack.enter_async_context(answering("status", replica)) for replica in replicas]
        return await verify.verify(tuple(addresses), wait_s=wait_s, plaintext=True)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "ASK_INTERVAL_S", 0.01)


async def test_identical_replicas() -> None:
    found = await verdict(Replica("a", ("r", "p")), Replica("b", ("r", "p")), Replica("c", ("r", "p")))
    assert found.agreed and found.differing is None
    assert found.explain() == (
        "identical: 3 replicas, 3 records, round 2, model p, average still being fetched"
    )


async def test_it_waits_until_they_hold_the_same_records() -> None:
    first = Replica("a", None, ("r1", "p1"), ("r2", "p2"), ("r3", "p3"))
    second = Replica("b", ("r0", "p0"), ("r2", "p2"), ("r3", "p3"))
    assert (await verdict(first, second)).agreed


async def test_the_same_records_and_another_model_is_the_proof() -> None:
    found = await verdict(Replica("a", ("r", "p")), Replica("b", ("r", "q")))
    assert not found.agreed and found.differing is not None
    assert "DIFFERENT models" in found.explain()


async def test_another_average_of_the_same_records_and_round_is_the_proof_too() -> None:
    first, other = Replica("a", ("r", "p", "x", "8")), Replica("b", ("r", "p", "y", "8"))
    assert (await verdict(first, other)).differing is not None
    assert (await verdict(first, Replica("b", ("r", "p", "y", "7")))).agreed, "as of another round"
    assert (await verdict(first, Replica("b", ("r", "p", "", "0")))).agreed, "it is being fetched"


async def test_the_proof_counts_even_if_they_held_the_records_at_different_times() -> None:
    first = Replica("a", ("r1", "p1"), ("r2", "p2"))
    second = Replica("b", ("r0", "p0"), ("r1", "WRONG"), ("r5", "p5"))
    assert (await verdict(first, second)).differing is not None


async def test_who_has_answered_before_is_waited_for() -> None:
    """A busy node does not answer every question within its time."""
    first = Replica("a", ("r1", "p1"), ("r2", "p2"), ("r3", "p3"))
    second = Replica("b", ("r0", "p0"), ("r2", "p2"), ("r3", "p3"))
    silent = iter([False, True, True])

    def now_and_then() -> bytes:
        return b"" if next(silent, False) else second()

    assert (await verdict(first, now_and_then)).agreed
    once = iter([b'{"swarm_id": "s", "node_id": "b"}'])
    with pytest.raises(UnreachableError, match="cannot be read"):
        await verdict(first, lambda: next(once, b""), wait_s=0.1)
    with pytest.raises(UnreachableError, match="cannot be read"):
        await verdict(first, lambda: b"", wait_s=3600.0)


async def test_never_the_same_records_is_not_comparable() -> None:
    found = await verdict(Replica("a", ("r", "p")), Replica("b", ("s", "q")), wait_s=0.1)
    assert not found.agreed and found.differing is None
    assert found.explain().startswith("not comparable")
    empty = await verdict(Replica("a", None), Replica("b", None), wait_s=0.1)
    assert not empty.agreed


async def test_different_swarms_and_one_node_twice_are_mistakes() -> None:
    with pytest.raises(ConfigError, match="different swarms"):
        await verdict(Replica("a", ("r", "p")), Replica("b", ("r", "p"), swarm="t"))
    with pytest.raises(ConfigError, match="agrees with itself"):
        await verdict(Replica("a", ("r", "p")), Replica("a", ("r", "p")))
    async with answering("status", Replica("a", ("r", "p"))) as address:
        with pytest.raises(ConfigError, match="agrees with itself"):
            async with asyncio.timeout(60):
                await verify.verify((address, address), wait_s=0.1, plaintext=True)
