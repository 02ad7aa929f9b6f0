"""Text of a model or of another node, as it may be shown on a terminal; and how wide what is none is."""

WRONG_SHAPE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What reading JSON raises that others have sent, if it is not what it should be."""

UNBOUNDED = 10_000
"""Columns of what is no terminal: lines are as long as they have to be, for programs that look for one."""


def harmless(text: str) -> str:
    """Without what would command a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def harmless_line(text: str) -> str:
    """That, and nothing that would begin another line or move the cursor."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
