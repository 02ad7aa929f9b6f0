"""What the nodes to join say: whether they answer, for which swarm, and what time it is there."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gossamer.node.address import Contact
from gossamer.node.config.findings import Finding, error, ok, warning
from gossamer.node.network import clocks
from gossamer.node.network.asking import Asker
from gossamer.node.network.client import probe_status
from gossamer.protocol.errors import LocalError, NotAnsweredError


@dataclass(slots=True)
class Answers:
    """What the nodes answered."""

    findings: list[Finding] = field(default_factory=list)
    swarm_ids: list[str] = field(default_factory=list)
    offsets: list[float | None] = field(default_factory=list)
    """How many seconds the nodes' clocks are ahead of ours."""
    members: int = 0


def ask_nodes(
    contacts: Sequence[Contact], swarm_id: str | None, *, plaintext: bool, asker: Asker | None
) -> Answers:
    """Ask all nodes at once. It is an error if one belongs to a swarm other than `swarm_id` (id or
    prefix)."""
    answers = Answers()
    asyncio.run(_ask_all(answers, contacts, swarm_id, plaintext, asker))
    if contacts and not answers.swarm_ids:
        answers.findings = [Finding("error", found.subject, found.text) for found in answers.findings]
    said = clocks.judge(answers.offsets)
    if said is not None:
        answers.findings.append(warning("clock", f"{said}: set it (NTP) before the node starts"))
    elif any(offset is not None for offset in answers.offsets):
        answers.findings.append(ok("clock", "agrees with the nodes to join"))
    return answers


async def _ask_all(
    answers: Answers,
    contacts: Sequence[Contact],
    swarm_id: str | None,
    plaintext: bool,
    asker: Asker | None,
) -> None:
    async with asyncio.TaskGroup() as group:
        for contact in contacts:
            group.create_task(_ask_one(answers, contact, swarm_id, plaintext, asker))


async def _ask_one(
    answers: Answers, contact: Contact, swarm_id: str | None, plaintext: bool, asker: Asker | None
) -> None:
    try:
        status, offset_s = await probe_status(contact, plaintext=plaintext, asker=asker)
    except NotAnsweredError as problem:
        answers.findings.append(
            warning("join", f"{problem}; a node that was never invited needs an invitation (--invite)")
        )
        return
    except LocalError as problem:
        answers.findings.append(warning("join", str(problem)))
        return
    answers.offsets.append(offset_s)
    found = str(status["swarm_id"])
    answers.swarm_ids.append(found)
    if swarm_id is not None and not found.startswith(swarm_id.lower()):
        answers.findings.append(
            error("join", f"{contact.address} belongs to swarm {found[:12]}, not {swarm_id[:12]}")
        )
        return
    members = 1 + _count(status.get("members"))
    answers.members = max(answers.members, members)
    answers.findings.append(
        ok("join", f"{contact.address} answers for swarm {found[:12]}; members: {members}")
    )


def _count(members: Any) -> int:
    return len(members) if isinstance(members, list) else 0
