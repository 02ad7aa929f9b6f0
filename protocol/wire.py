"""msgpack with a bound on everything.

All structured bytes from the network come through `unpack` and `Fields`: positional arrays. The type and
range of every field are checked before use, so that the rest of the code never meets a surprise. A dataclass
whose fields are annotated with readers, as ``number: Annotated[int, integer(0, 9)]``, is its own schema:
`values` gives the array, `read` checks one.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import fields as fields_of
from typing import Any, TypeVar, get_type_hints
from unicodedata import ucd_3_2_0

import msgpack

from gossamer.protocol.errors import MalformedError
from gossamer.protocol.limits import ARRAYS_MAX, TEXT_BYTES_MAX

_NOT_PRINTABLE = frozenset({"Cc", "Cf", "Cs", "Co", "Zs", "Zl", "Zp"})
"""Unicode categories: control, format (marks of direction and the like), surrogate, private, separators."""


def pack(value: Any) -> bytes:
    """Serialise ints, floats, bytes, str, bool, None, and lists or tuples of them."""
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def unpack(data: bytes, bytes_max: int) -> Any:
    """Parse one msgpack value. Raises MalformedError on anything but one well-formed value.

    Maps and extension types are refused outright: nothing in the protocol uses them.
    """
    if len(data) > bytes_max:
        raise MalformedError(f"message of {len(data)} bytes, over the limit of {bytes_max}")
    try:
        _walk(data)
        return msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            list_hook=at_most(ARRAYS_MAX) if len(data) > ARRAYS_MAX else None,  # each takes a byte or more
            max_str_len=len(data),
            max_bin_len=len(data),
            max_array_len=len(data),
            max_map_len=0,
            max_ext_len=0,
            object_hook=_refuse,  # the limits let empty ones pass
            ext_hook=_refuse,
        )
    except MemoryError:  # ours is lacking, whatever the bytes are: `_walk` has found all that they announce
        raise
    except Exception as error:  # msgpack raises ValueError, its own classes and, for bad UTF-8, UnicodeError
        raise MalformedError(f"not msgpack: {type(error).__name__}") from None


def _walk(data: bytes) -> None:
    """Walk through a value without building it. Raises if it ends too soon.

    msgpack allocates an array, at each level, before it reads the items: a few kilobytes that do nothing but
    open arrays could claim gigabytes.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    unpacker.skip()


def _refuse(*_: Any) -> Any:
    raise ValueError("a kind that nothing in the protocol uses")


def at_most(count: int) -> Callable[..., Any]:
    """A hook for msgpack's arrays, maps or extension types: ValueError if there are more than `count`."""
    numbers = itertools.count(1)

    def check(value: Any, *_: Any) -> Any:
        if next(numbers) > count:
            raise ValueError(f"more than {count} of a kind")
        return value

    return check


def is_printable(text: str) -> bool:
    """Whether a text has nothing that controls a terminal, and no space other than the plain one.

    It goes by the tables of Unicode 3.2, which every Python has besides its own newer ones: whether a
    revocation is valid must not depend on a node's Python. Characters added since then pass, whatever they
    are: displays and logs check by their own tables.
    """
    if text.isascii():
        return text.isprintable()
    return all(c == " " or ucd_3_2_0.category(c) not in _NOT_PRINTABLE for c in text)


class Fields:
    """Reads a positional array field by field. Each reader raises a MalformedError that names the field."""

    __slots__ = ("_next", "_values", "_what")

    def __init__(self, value: Any, what: str) -> None:
        if not isinstance(value, list):
            raise MalformedError(f"{what}: expected an array")
        self._values = value
        self._next = 0
        self._what = what

    def _take(self, name: str) -> Any:
        if self._next >= len(self._values):
            raise MalformedError(f"{self._what}: field {name} is missing")
        self._next += 1
        return self._values[self._next - 1]

    def _fail(self, name: str, problem: str) -> MalformedError:
        return MalformedError(f"{self._what}: field {name} {problem}")

    def integer(self, name: str, low: int, high: int) -> int:
        value = self._take(name)
        if type(value) is not int or not low <= value <= high:
            raise self._fail(name, f"is not an integer from {low} to {high}")
        return value

    def boolean(self, name: str) -> bool:
        value = self._take(name)
        if type(value) is not bool:
            raise self._fail(name, "is not a boolean")
        return value

    def refuses(self) -> bool:
        """Whether the next field is a plain `false` in place of the expected value; if so, skip it."""
        refused = self._values[self._next : self._next + 1] == [False] and self._values[self._next] is False
        self._next += refused
        return refused

    def number(self, name: str, low: float, high: float) -> float:
        value = self._take(name)
        if type(value) is not float or not math.isfinite(value) or not low <= value <= high:
            raise self._fail(name, f"is not a float from {low} to {high}")
        return value

    def blob(self, name: str, low: int, high: int | None = None) -> bytes:
        """Bytes, of length `low` exactly, or of length `low` to `high`."""
        return self._as_blob(name, self._take(name), low, low if high is None else high)

    def text(self, name: str, high: int = TEXT_BYTES_MAX) -> str:
        """Text of at most `high` bytes for which `is_printable` holds."""
        return self._as_text(name, self._take(name), high)

    def texts(self, name: str, high: int) -> tuple[str, ...]:
        """At most `high` printable texts."""
        return tuple(self._as_text(name, item, TEXT_BYTES_MAX) for item in self.array(name, high))

    def array(self, name: str, high: int) -> list[Any]:
        value = self._take(name)
        if not isinstance(value, list) or len(value) > high:
            raise self._fail(name, f"is not an array of at most {high} items")
        return value

    def blobs(self, name: str, size: int, high: int) -> tuple[bytes, ...]:
        """At most `high` byte strings of exactly `size` bytes each."""
        return tuple(self._as_blob(name, item, size, size) for item in self.array(name, high))

    def _as_text(self, name: str, value: Any, high: int) -> str:
        if (
            not isinstance(value, str)
            or not is_printable(value)
            or len(value.encode("utf-8", "replace")) > high
        ):
            raise self._fail(name, f"is not printable text of at most {high} bytes")
        return value

    def _as_blob(self, name: str, value: Any, low: int, high: int) -> bytes:
        if not isinstance(value, bytes) or not low <= len(value) <= high:
            raise self._fail(name, f"is not {low} to {high} bytes")
        return value

    def end(self) -> None:
        """Check that no field is left: two encodings of one meaning would have two hashes."""
        if self._next != len(self._values):
            raise MalformedError(f"{self._what}: {len(self._values) - self._next} fields too many")


# --- Schemas: how the fields of a dataclass are read.

Reader = Callable[[Fields, str], Any]
_T = TypeVar("_T")


def integer(low: int, high: int) -> Reader:
    return lambda fields, name: fields.integer(name, low, high)


def number(low: float, high: float) -> Reader:
    return lambda fields, name: fields.number(name, low, high)


def boolean(fields: Fields, name: str) -> bool:
    return fields.boolean(name)


def text(fields: Fields, name: str) -> str:
    return fields.text(name)


def blob(size: int) -> Reader:
    return lambda fields, name: fields.blob(name, size)


def blobs(size: int, high: int) -> Reader:
    return lambda fields, name: fields.blobs(name, size, high)


_SCHEMAS: dict[type, list[tuple[str, Reader]]] = {}


def values(item: Any) -> list[Any]:
    """The fields of a dataclass, in order."""
    return [getattr(item, name) for name in item.__dataclass_fields__]


def read(kind: type[_T], fields: Fields) -> _T:
    """A dataclass of this kind. Raises MalformedError."""
    if kind not in _SCHEMAS:
        hints = get_type_hints(kind, include_extras=True)
        _SCHEMAS[kind] = [(field.name, hints[field.name].__metadata__[0]) for field in fields_of(kind)]  # type: ignore[arg-type]
    return kind(**{name: reader(fields, name) for name, reader in _SCHEMAS[kind]})
