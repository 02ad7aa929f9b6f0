"""`gossamer verify`: do replicas that hold the same records hold the same bits?

Nodes of a running swarm hold the same records only at moments, so they are asked until they do. Two answers
with the same digest of merged records and different digests of Phi are the proof that something is wrong.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from gossamer.node.network.client import Asker, fetch_status
from gossamer.protocol.errors import ConfigError, UnreachableError

ASK_INTERVAL_S = 0.25


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found. `differing` names two nodes with equal records and different models."""

    agreed: bool
    differing: tuple[str, str] | None
    answers: dict[str, dict[str, Any]]

    def explain(self) -> str:
        """One line for a person."""
        if self.differing:
            return f"{self.differing[0]} and {self.differing[1]} hold the same records and DIFFERENT models"
        if self.agreed:
            answer = next(iter(self.answers.values()))
            return (
                f"identical: {len(self.answers)} replicas, {answer.get('records', '?')} records,"
                f" round {answer.get('clock', '?')}, model {answer['phi_digest'][:16]}"
            )
        return "not comparable: the nodes never held the same records at once; ask again with a longer --wait"


async def verify(
    addresses: tuple[str, ...], *, wait_s: float, plaintext: bool, asker: Asker | None = None
) -> Verdict:
    """Ask until all hold the same records, for at most `wait_s`. Raises UnreachableError or ConfigError.

    Who has answered once may be busy, or start again, when it is asked the next time: it is waited for.
    """
    deadline = time.monotonic() + wait_s
    seen: dict[str, tuple[str, str]] = {}
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
        found = [answer for _, answer in answered]
        if len({answer["node_id"] for answer in found}) < len(found):
            raise ConfigError("two of these addresses lead to one node, which agrees with itself")
        answers = dict(answered)
        known_to_answer.update(answers)
        swarms = {answer["swarm_id"] for answer in found}
        if len(swarms) > 1:
            raise ConfigError("these nodes belong to different swarms; verify one swarm at a time")
        for address, answer in answers.items():
            if not {"merged_digest", "phi_digest"} <= answer.keys():
                continue
            known = seen.setdefault(answer["merged_digest"], (address, answer["phi_digest"]))
            if known[1] != answer["phi_digest"]:
                return Verdict(False, (known[0], address), answers)
        merged = {(answer.get("merged_digest"), answer.get("phi_digest")) for answer in found}
        have_all = len(found) == len(addresses)
        if have_all and len(merged) == 1 and None not in next(iter(merged)):
            return Verdict(True, None, answers)
        if have_all and time.monotonic() > deadline:
            return Verdict(False, None, answers)
        await asyncio.sleep(ASK_INTERVAL_S)
