"""Changes to valid inputs that leave most of their structure alone.

Random bytes fail at the first check, so nearly all inputs begin as something valid. A change is made either
to the bytes or to one node of the msgpack tree that they hold. Each change follows from one `Random`.
"""

from __future__ import annotations

import math
import struct
from random import Random
from typing import Any

import msgpack

BYTES_MAX = 200_000
"""Changes do not make inputs longer than this; the largest that the formats allow are seeds."""

TREE_BYTES_MAX = 60_000
"""Larger inputs are changed as bytes: a tree of millions of nodes takes long to walk."""

INTS = (
    *(0, 1, -1, 2, 127, 128, 255, 256, 4095, 4096, 2**15, 2**16 - 1, 2**24, 2**31 - 2, 2**31 - 1, 2**31),
    *(
        2**32 - 1,
        2**32,
        2**40,
        2**53,
        2**53 + 1,
        2**60,
        2**63 - 1,
        2**63,
        2**64 - 1,
        -128,
        -(2**31),
        -(2**63),
    ),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 5e-324, 1.7e308, -1.7e308, 1e6, 1e15, 1e-300)
TEXTS = (
    "",
    "\0",
    "\x1b[31m",
    "\n",
    "\u202e",
    "é" * 129,
    "x" * 256,
    "x" * 257,
    "exact",
    "topk",
    "mean",
    "open",
)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, b"", bytes(32), bytes(64))

Path = tuple[Any, ...]


def scalar(dice: Random) -> Any:
    """A value that a reader may not have been written for."""
    return dice.choice(dice.choice((INTS, FLOATS, TEXTS, OTHERS)))


def mutate_bytes(data: bytes, dice: Random) -> bytes:
    """Make one change to bytes: a flip, an extreme number, or something dropped, doubled or inserted."""
    raw = bytearray(data)
    at = dice.randrange(len(raw) + 1)
    span = slice(at, at + dice.choice((1, 1, 2, 4, 8, 32, 200)))
    match dice.randrange(8):
        case 0 if raw:
            raw[at % len(raw)] ^= 1 << dice.randrange(8)
        case 1 if raw:
            raw[at % len(raw)] = dice.choice((0, 1, 0x7F, 0x80, 0xC1, 0xFF, dice.randrange(256)))
        case 2:
            del raw[at:]
        case 3:
            del raw[span]
        case 4:
            raw[at:at] = raw[span]
        case 5:
            raw[at:at] = dice.randbytes(span.stop - at)
        case 6:
            number = dice.choice(INTS) % 2**64
            form = dice.choice(("<Q", ">Q", "<I", ">I", "<H", ">H"))
            packed = struct.pack(form, number % 2 ** (8 * struct.calcsize(form)))
            raw[at : at + len(packed)] = packed
        case _:
            raw[span] = dice.randbytes(len(raw[span]))
    return bytes(raw[:BYTES_MAX])


def nodes(value: Any, path: Path = ()) -> list[Path]:
    """The paths of all nodes of a tree, map values included but not map keys."""
    found = [path]
    if isinstance(value, list):
        for index, item in enumerate(value):
            found += nodes(item, (*path, index))
    elif isinstance(value, dict):
        for key, item in value.items():
            found += nodes(item, (*path, key))
    return found


def replaced(value: Any, path: Path, new: Any) -> Any:
    """A copy of a tree with `new` at `path`."""
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def at_path(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value


def mutate_value(value: Any, dice: Random) -> Any:
    """Make one change to a tree of lists, maps and scalars."""
    path = dice.choice(nodes(value))
    return replaced(value, path, _changed(at_path(value, path), dice))


def _changed(node: Any, dice: Random) -> Any:
    if dice.randrange(6) == 0:
        return scalar(dice)
    match node:
        case list():
            return _changed_list(node, dice)
        case dict():
            return _changed_map(node, dice)
        case bool():
            return not node
        case int():
            return dice.choice((dice.choice(INTS), node + 1, node - 1, -node)) if abs(node) < 2**63 else 0
        case float():
            return dice.choice((dice.choice(FLOATS), -node, node * 2))
        case bytes():
            return dice.choice((mutate_bytes(node, dice), node + b"\0", node[:-1], dice.randbytes(len(node))))
        case str():
            return dice.choice((dice.choice(TEXTS), node + "x", node[:-1], node * 2))
    return scalar(dice)


def _changed_list(node: list[Any], dice: Random) -> list[Any]:
    items = list(node)
    at = dice.randrange(len(items) + 1)
    match dice.randrange(6):
        case 0:
            del items[at : at + 1]
        case 1:
            items[at:at] = items[at : at + 1]
        case 2:
            items.insert(at, scalar(dice))
        case 3:
            items = items[:2000] * dice.choice((2, 3, 40))
        case 4:
            dice.shuffle(items)
        case _:
            for _ in range(dice.choice((1, 3, 500))):
                items = [items]
    return items


def _changed_map(node: dict[Any, Any], dice: Random) -> dict[Any, Any]:
    items = dict(node)
    key = dice.choice(list(items)) if items else "x"
    if dice.randrange(2):
        items.pop(key, None)
    else:
        items[dice.choice((str(key) + "x", "\x1b", b"b", 7, ""))] = items.get(key)
    return items


def mutate_packed(data: bytes, dice: Random) -> bytes:
    """Make one change to the msgpack value in `data`, or, now and then or if there is none, to its bytes."""
    if dice.randrange(4) == 0 or len(data) > TREE_BYTES_MAX:
        return mutate_bytes(data, dice)
    try:
        value = msgpack.unpackb(data, raw=False, strict_map_key=False)
        packed: bytes = msgpack.packb(mutate_value(value, dice), use_bin_type=True)
    except (ValueError, OverflowError, TypeError, RecursionError):  # no value, or one that cannot be packed
        return mutate_bytes(data, dice)
    return packed[:BYTES_MAX]
