"""`gossamer verify`: do replicas that hold the same records hold the same bits?

Nodes of a running swarm hold the same records only at moments, so they are asked until they do. Two answers
with the same digest of merged records and different digests of Phi prove that something is wrong. So do
different averaged models as of the same round.
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
                f" round {answer.get('clock', '?')}, model {answer['phi_digest'][:16]}, average"
                f" {answer.get('average_digest', '')[:16] or 'still being fetched'}"
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
    seen: dict[tuple[Any, ...], tuple[str, str]] = {}
    """By the digest of merged records, and the round of an average: the first node seen with it, and its
    digest of Phi or of the average."""
    has_answered: set[str] = set()
    while True:
        is_over = time.monotonic() > deadline
        asked = await asyncio.gather(
            *(fetch_status(a, digest=True, plaintext=plaintext, asker=asker) for a in addresses),
            return_exceptions=True,
        )
        answers: dict[str, dict[str, Any]] = {}
        for address, answer in zip(addresses, asked, strict=True):
            if not isinstance(answer, BaseException):
                if address in answers or answer["node_id"] in [each["node_id"] for each in answers.values()]:
                    raise ConfigError(
                        "two of these addresses lead to the same node, which agrees with itself"
                    )
                answers[address] = answer
            elif is_over or address not in has_answered or not isinstance(answer, UnreachableError):
                raise answer
        has_answered.update(answers)
        if len({answer["swarm_id"] for answer in answers.values()}) > 1:
            raise ConfigError("these nodes belong to different swarms; verify one swarm at a time")
        held = {a: (each.get("merged_digest"), each.get("phi_digest")) for a, each in answers.items()}
        for address, (records, phi) in held.items():
            average, upto = answers[address].get("average_digest"), answers[address].get("average_round")
            for key, model in (((records,), phi), ((records, upto), average)):
                first, expected = seen.setdefault(key, (address, model)) if model else (address, model)
                if records is not None and model != expected:
                    return Verdict(False, (first, address), answers)
        if len(answers) == len(addresses):
            if len(set(held.values())) == 1 and None not in held[addresses[0]]:
                return Verdict(True, None, answers)
            if is_over:
                return Verdict(False, None, answers)
        await asyncio.sleep(ASK_INTERVAL_S)
