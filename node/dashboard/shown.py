"""Makes text from a model or from another node safe to show on a terminal."""

WRONG_SHAPE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Errors from reading other nodes' JSON, or writing it again, if it is not what it should be."""

UNBOUNDED = 10_000
"""Width of output that is not a terminal: lines are not wrapped, for programs that search them."""


def harmless(text: str) -> str:
    """A text without control sequences for a terminal; line breaks and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def harmless_line(text: str) -> str:
    """As `harmless`, but also without line breaks and tabs."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
