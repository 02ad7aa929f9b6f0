"""msgpack with a bound on everything.

All structured bytes from the network come through `unpack` and `read`: positional arrays. The type and range
of every field are checked before use, so that the rest of the code never meets a surprise. A class whose
fields are annotated with checks, as ``number: Annotated[int, integer(0, 9)]``, is its own schema: `values`
gives the array, `read` checks one.
"""

import itertools
import math
from collections.abc import Callable
from functools import cache
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


# --- Schemas: what the fields of a class may be.

Check = Callable[[Any], Any]
"""Takes an unpacked value, and returns what it stands for. Raises ValueError that says what it should be."""
_T = TypeVar("_T")


def integer(low: int, high: int) -> Check:
    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"is not an integer from {low} to {high}")
        return value

    return check


def number(low: float, high: float) -> Check:
    def check(value: Any) -> float:
        if type(value) is not float or not math.isfinite(value) or not low <= value <= high:
            raise ValueError(f"is not a float from {low} to {high}")
        return value

    return check


def boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("is not a boolean")
    return value


def blob(low: int, high: int | None = None) -> Check:
    """Bytes, of length `low` exactly, or of length `low` to `high`."""
    most = low if high is None else high

    def check(value: Any) -> bytes:
        if not isinstance(value, bytes) or not low <= len(value) <= most:
            raise ValueError(f"is not {low} to {most} bytes")
        return value

    return check


def text(high: int = TEXT_BYTES_MAX) -> Check:
    """Text of at most `high` bytes for which `is_printable` holds."""

    def check(value: Any) -> str:
        is_text = isinstance(value, str) and is_printable(value)
        if not is_text or len(value.encode("utf-8", "replace")) > high:
            raise ValueError(f"is not printable text of at most {high} bytes")
        return str(value)

    return check


def array(item: Check, high: int) -> Check:
    """At most `high` items, as a tuple."""

    def check(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) > high:
            raise ValueError(f"is not an array of at most {high} items")
        return tuple([item(each) for each in value])

    return check


def row(*columns: Check) -> Check:
    """Exactly these fields, as a tuple."""

    def check(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(columns):
            raise ValueError(f"is not an array of {len(columns)} fields")
        return tuple([column(each) for column, each in zip(columns, value, strict=True)])

    return check


def take(value: Any, what: str, *columns: Check) -> tuple[Any, ...]:
    """Exactly these fields of `what`. Raises MalformedError."""
    try:
        fields: tuple[Any, ...] = row(*columns)(value)
    except ValueError as error:
        raise MalformedError(f"{what}: {error}") from None
    return fields


@cache
def _schema(kind: type) -> list[tuple[str, Check]]:
    hints = get_type_hints(kind, include_extras=True)
    return [(name, hint.__metadata__[0]) for name, hint in hints.items()]


def values(item: Any) -> list[Any]:
    """The fields of a dataclass, in order."""
    return [getattr(item, name) for name in item.__dataclass_fields__]


def read(kind: type[_T], value: Any, what: str) -> _T:
    """A dataclass or named tuple of this kind, from the array of its fields.

    Raises MalformedError that names the field of `what`. No field may be left: two encodings of one meaning
    would have two hashes.
    """
    schema = _schema(kind)  # type: ignore[arg-type]
    if not isinstance(value, list) or len(value) != len(schema):
        raise MalformedError(f"{what}: not an array of {len(schema)} fields")
    fields = {}
    for (name, check), each in zip(schema, value, strict=True):
        try:
            fields[name] = check(each)
        except ValueError as error:
            raise MalformedError(f"{what}: field {name} {error}") from None
    return kind(**fields)
