"""What `gossamer config check` finds: one line each, with what to do."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from gossamer.protocol.errors import LocalError


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the check."""

    level: str
    """ok, warning (the node would run) or error (it would not)."""
    subject: str
    """What was checked: a key, a file, a device ..."""
    text: str


ok: Callable[[str, str], Finding] = partial(Finding, "ok")
warning: Callable[[str, str], Finding] = partial(Finding, "warning")
error: Callable[[str, str], Finding] = partial(Finding, "error")


def told(subject: str, look: Callable[[], str]) -> Iterator[Finding]:
    """Ok with what `look` returns, or an error with the message of the LocalError that it raises."""
    try:
        yield ok(subject, look())
    except LocalError as problem:
        yield error(subject, str(problem))
