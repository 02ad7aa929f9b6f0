"""Text of a model or of another node, as it may be shown on a terminal."""


def harmless(text: str) -> str:
    """Without what would command a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
