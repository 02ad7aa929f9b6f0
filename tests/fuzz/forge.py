"""Values made from a dataclass's type hints, so that new kinds of messages are forged without more code."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from random import Random
from typing import Any

from tests.fuzz.mutate import FLOATS, INTS, TEXTS

Blobs = Callable[[Random], bytes]


def blobs_from(pool: Sequence[bytes]) -> Blobs:
    """Byte strings: mostly from those given, otherwise random ones as long as ids and signatures."""
    return lambda dice: (
        dice.choice(pool) if pool and dice.randrange(8) else dice.randbytes(dice.choice((32, 32, 64, 200)))
    )


def forge(kind: Any, dice: Random, blobs: Blobs) -> Any:
    """A value of a type: a dataclass, a tuple of types, an optional one, or a scalar."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{field.name: forge(hints[field.name], dice, blobs) for field in fields(kind)})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and arguments[1:] == (...,):
        return tuple(forge(arguments[0], dice, blobs) for _ in range(dice.choice((0, 1, 1, 2, 5, 20))))
    if origin is tuple:
        return tuple(forge(argument, dice, blobs) for argument in arguments)
    if origin in (types.UnionType, typing.Union):
        return forge(dice.choice(arguments), dice, blobs)
    if kind is bool:
        return dice.random() < 0.5
    if kind is int:
        return dice.choice((dice.randrange(8), dice.randrange(300), abs(dice.choice(INTS))))
    if kind is float:
        return dice.choice(FLOATS)
    if kind is bytes:
        return blobs(dice)
    return dice.choice(TEXTS) if kind is str else None


def conforms(value: Any, kind: Any) -> bool:
    """Whether a value, with all that it contains, is of its declared type."""
    if is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return type(value) is kind and all(
            conforms(getattr(value, item.name), hints[item.name]) for item in fields(kind)
        )
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple and arguments[1:] == (...,):
        return type(value) is tuple and all(conforms(item, arguments[0]) for item in value)
    if origin is tuple:
        same_length = type(value) is tuple and len(value) == len(arguments)
        return same_length and all(map(conforms, value, arguments))
    if origin in (types.UnionType, typing.Union):
        return any(conforms(value, argument) for argument in arguments)
    return value is None if kind is types.NoneType else type(value) is kind
