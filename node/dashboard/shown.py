"""Text of a model or of another node, as it may be shown on a terminal."""

WRONG_SHAPE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What reading JSON raises that others have sent, if it is not what it should be."""


def harmless(text: str) -> str:
    """Without what would command a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)


def harmless_line(text: str) -> str:
    """That, and nothing that would begin another line or move the cursor."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
