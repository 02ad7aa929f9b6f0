"""`gossamer verify`: do replicas that hold the same records hold the same bits?

Nodes of a running swarm hold the same records only at moments, so they are asked until they do. Two answers
with the same digest of merged records and different digests of Phi prove that something is wrong.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from gossamer.node.daemon.network.rpc import Asker, fetch_status
from gossamer.protocol.errors import ConfigError, UnreachableError

ASK_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result. `differing` names two nodes with equal records and different models."""

    agreed: bool
    differing: tuple[str, str] | None
    answers: dict[str, dict[str, Any]]

    def explain(self) -> str:
        """One line for a person."""
        if self.differing:
            return f"{self.differing[0]} and {self.differing[1]} hold the same records but DIFFERENT models"
        if self.agreed:
            answer = next(iter(self.answers.values()))
            return (
                f"identical: {len(self.answers)} replicas, {answer.get('records', '?')} records,"
                f" round {answer.get('clock', '?')}, model {answer['phi_digest'][:16]}"
            )
        return (
            "not comparable: the nodes never held the same records at the same time; ask again with a longer"
            " --wait"
        )


async def verify(
    addresses: tuple[str, ...], *, wait_s: float, plaintext: bool, asker: Asker | None = None
) -> Verdict:
    """Ask until all hold the same records, for at most `wait_s`. Raises UnreachableError or ConfigError.

    A node that has answered once may be busy or restarting when it is asked again, so it is waited for.
    """
    deadline = time.monotonic() + wait_s
    seen: dict[str, tuple[str, str]] = {}
    """By the digest of merged records: the first node seen with these records, and its digest of Phi."""
    known_to_answer: set[str] = set()
    while True:
        is_over = time.monotonic() > deadline
        asked = await asyncio.gather(
            *(fetch_status(a, digest=True, plaintext=plaintext, asker=asker) for a in addresses),
            return_exceptions=True,
        )
        answered: list[tuple[str, dict[str, Any]]] = []  # one address may have been given twice
        for address, answer in zip(addresses, asked, strict=True):
            if not isinstance(answer, BaseException):
                answered.append((address, answer))
            elif is_over or address not in known_to_answer or not isinstance(answer, UnreachableError):
                raise answer
        _check_comparable([answer for _, answer in answered])
        answers = dict(answered)
        known_to_answer.update(answers)
        if differing := _differing(answers, seen):
            return Verdict(False, differing, answers)
        if len(answered) == len(addresses):
            if _are_identical(answers):
                return Verdict(True, None, answers)
            if time.monotonic() > deadline:
                return Verdict(False, None, answers)
        await asyncio.sleep(ASK_INTERVAL_S)


def _check_comparable(answers: list[dict[str, Any]]) -> None:
    """Raise ConfigError unless the answers are from different nodes of one swarm."""
    if len({answer["node_id"] for answer in answers}) < len(answers):
        raise ConfigError("two of these addresses lead to the same node, which agrees with itself")
    if len({answer["swarm_id"] for answer in answers}) > 1:
        raise ConfigError("these nodes belong to different swarms; verify one swarm at a time")


def _differing(
    answers: dict[str, dict[str, Any]], seen: dict[str, tuple[str, str]]
) -> tuple[str, str] | None:
    """Two nodes that held the same records, perhaps at different moments, and different models; None if there
    are none. Notes these answers in `seen`."""
    for address, answer in answers.items():
        if not {"merged_digest", "phi_digest"} <= answer.keys():
            continue
        first, phi_digest = seen.setdefault(answer["merged_digest"], (address, answer["phi_digest"]))
        if phi_digest != answer["phi_digest"]:
            return first, address
    return None


def _are_identical(answers: dict[str, dict[str, Any]]) -> bool:
    """Whether all these nodes have a model, and now hold the same records and the same bits."""
    held = {(answer.get("merged_digest"), answer.get("phi_digest")) for answer in answers.values()}
    return len(held) == 1 and None not in next(iter(held))
