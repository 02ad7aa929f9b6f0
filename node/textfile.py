"""Text files that a person has written or edited."""

from pathlib import Path

from gossamer.protocol.errors import ConfigError


def read_bytes(path: Path, bytes_max: int, *, kind: str) -> bytes:
    """A whole file. Raises ConfigError if it cannot be read, or is too large for its `kind`."""
    try:
        with open(path, "rb") as file:
            data = file.read(bytes_max + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    if len(data) > bytes_max:
        raise ConfigError(f"{path} is too large for a {kind}")
    return data


def read_text(path: Path, bytes_max: int, *, kind: str, hint: str) -> str:
    """A whole file as text: `read_bytes`, then `as_text`. Raises ConfigError."""
    return as_text(read_bytes(path, bytes_max, kind=kind), path, kind=kind, hint=hint)


def as_text(data: bytes, path: Path, *, kind: str, hint: str) -> str:
    """A file's content without a byte order mark.

    Raises ConfigError if it is not UTF-8; the message says by `hint` what a file of that `kind` is.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text; a {kind} is {hint}") from None
