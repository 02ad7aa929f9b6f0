"""Text and numbers as a terminal shows them: without control sequences of others, and short."""

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


def count(number: float) -> str:
    """ "950", "12.3k", "4.56M"."""
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g}{unit}" if number < 999.5 * scale else f"{number / scale:.0f}{unit}"
    return f"{number:.0f}"


def size(number: float) -> str:
    """Bytes: "950 B", "12.3 kB"."""
    text = count(number)
    return f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"


def three_decimals(value: float | None) -> str:
    """ "2.718", or "-" for what is not known."""
    return f"{value:.3f}" if value is not None else "-"


def both_losses(average: float | None, live: float | None) -> str:
    """Held-out losses of the averaged and of the live model: "1.987 averaged, 2.123 live"; what is not known
    is left out."""
    both = (average, "averaged"), (live, "live")
    return ", ".join(f"{loss:.3f} {of}" for loss, of in both if loss is not None)
