"""Caches of pure functions: the one thing that makes many seeds affordable.

Sixteen nodes in one process would check the same signature, parse the same row and merge the same round
sixteen times. Each result is a function of exact bytes, so it is computed once and remembered by those bytes,
errors included. The real functions still run for every value that is seen for the first time. The patches are
confined to a `with` block of the simulator, and the protocol knows nothing of them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from types import ModuleType
from typing import Any

from gossamer.protocol import messages, replica
from gossamer.protocol.errors import PeerError
from gossamer.protocol.fixedpoint import Ints
from gossamer.protocol.gossip import announce
from gossamer.protocol.identity import Identity
from gossamer.protocol.manifest import Manifest
from gossamer.protocol.membership import member_records
from gossamer.protocol.merge.merge import Contribution
from gossamer.protocol.payloads import Fragment
from gossamer.protocol.records import Delta, Envelope, RecordKind
from tests.protocol import builders
from tests.sim import fold
from tests.sim.trace import Trace

Patch = tuple[ModuleType, str, Callable[..., Any]]
"""A module, the name of a function in it, and a wrapper to replace that function with."""

ENTRIES_MAX = 20_000
"""Rows are seen within seconds of their birth and then hardly ever again, as are messages."""

MESSAGES_MAX = 2_000
"""Messages are large: this many fit into a processor's cache, and most arrive within a second."""

CHECKED = 16
"""One message in this many is parsed and compared with what its sender meant; large ones always are."""

LARGE_BYTES = 8192


def _remembering(
    pure: Callable[..., Any],
    key: Callable[..., Any],
    known: dict[Any, tuple[Any, PeerError | None]] | None = None,
) -> Callable[..., Any]:
    """`pure`, computed once for each key. A PeerError is an outcome like any other."""
    known = {} if known is None else known

    def lookup(*args: Any) -> Any:
        name = key(*args)
        found = known.get(name)
        if found is None:
            if len(known) >= ENTRIES_MAX:
                known.clear()
            try:
                found = (pure(*args), None)
            except PeerError as error:
                found = (None, error)
            known[name] = found
        if found[1] is not None:
            raise found[1].with_traceback(None)
        return found[0]

    return lookup


def _decoding(
    pure: Callable[[bytes], messages.Message], said: dict[bytes, messages.Message]
) -> Callable[[bytes], messages.Message]:
    """Bytes that a core has serialised mean the message that it sent; any others are parsed each time."""

    def decode(data: bytes) -> messages.Message:
        return said.get(data) or pure(data)

    return decode


def _sealing(pure: Callable[..., Envelope], opened: dict[Any, Any]) -> Callable[..., Envelope]:
    """An envelope that a real key has signed verifies, as long as not one bit of it has changed."""

    def seal(identity: Identity, kind: RecordKind, swarm_id: bytes, body: bytes) -> Envelope:
        envelope = pure(identity, kind, swarm_id, body)
        opened[envelope.data] = (envelope, None)
        return envelope

    return seal


@contextmanager
def _patched(*patches: Patch) -> Iterator[None]:
    """Wrap functions for a while."""
    originals = [(module, name, getattr(module, name)) for module, name, _ in patches]
    for module, name, wrap in patches:
        setattr(module, name, wrap(getattr(module, name)))
    try:
        yield
    finally:
        for module, name, original in originals:
            setattr(module, name, original)


@contextmanager
def remembered(encoder: "Encoder | None" = None) -> Iterator[None]:
    """Let the cores in this process share what they find out about exact bytes.

    With an `encoder`, messages that it serialised lately are not parsed again either.
    """
    opened: dict[Any, Any] = {}
    parsed: dict[Any, Any] = {}
    rows: dict[Any, Any] = {}

    def by_data(envelope: Envelope, layout: Any) -> bytes:
        return envelope.data

    with _patched(
        (replica, "open_envelope", lambda pure: _remembering(pure, lambda data, swarm_id: data, opened)),
        (announce, "seal", lambda pure: _sealing(pure, opened)),
        (member_records, "seal", lambda pure: _sealing(pure, opened)),
        (member_records, "parse_member_record", lambda pure: _remembering(pure, attrgetter("data"), rows)),
        (replica, "parse_member_record", lambda pure: _remembering(pure, attrgetter("data"), rows)),
        (announce, "parse_delta", lambda pure: _remembering(pure, by_data, parsed)),
        (replica, "parse_delta", lambda pure: _remembering(pure, by_data, parsed)),
        *([(messages, "decode", lambda pure: _decoding(pure, encoder.said))] if encoder else []),
    ):
        yield


class Encoder:
    """Serialises messages; one that goes to several links is serialised once, as by the daemon."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._last: messages.Message | None = None
        self._data = b""
        self._count = 0
        self.said: dict[bytes, messages.Message] = {}
        """The messages serialised lately, by their bytes."""

    def __call__(self, message: messages.Message) -> bytes:
        if message is not self._last:
            self._last, self._data = message, messages.encode(message)
            self._trace.read(self._data)
            self._remember(message, self._data)
        return self._data

    def _remember(self, message: messages.Message, data: bytes) -> None:
        self._count += 1
        if self._count % CHECKED == 0 or len(data) > LARGE_BYTES:
            self.said.pop(data, None)
            assert messages.decode(data) == message, f"{message} is not what its bytes mean"
        if len(self.said) >= MESSAGES_MAX:
            self.said.clear()
        self.said[data] = message


def _decoded(delta: Delta, data: bytes, fragment: Fragment, fragments: int) -> Contribution | None:
    """A contribution whose tensors have been decoded."""
    found = fold.contribution(delta, data, fragment, fragments)
    if found is None:
        return None
    tensors = [builders.Plain(found.tensor(index).decode()) for index in range(len(fragment.slots))]
    for tensor in tensors:
        tensor.values.setflags(write=False)
    return replace(found, tensor=tensors.__getitem__)


class MergeMemo:
    """Merges rounds. The same records in the same order and with the same payloads are merged only once.

    The order is part of the key: a Merge that depended on it would still be detected.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Ints] = {}
        self._decode = _remembering(_decoded, lambda delta, data, fragment, fragments: (delta.data, data))

    def __call__(
        self, deltas: tuple[Delta, ...], payloads: Sequence[bytes], fragment: Fragment, manifest: Manifest
    ) -> Ints:
        key = (tuple(delta.record_id for delta in deltas), tuple(payloads))
        result = self._known.get(key)
        if result is None:
            if len(self._known) >= ENTRIES_MAX:
                self._known.clear()
            result = fold.merged(deltas, payloads, fragment, manifest, self._decode)
            result.setflags(write=False)
            self._known[key] = result
        return result
