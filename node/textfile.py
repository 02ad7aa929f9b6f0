"""Text files that a person has written or edited."""

from pathlib import Path

from gossamer.protocol.errors import ConfigError


def read_text(path: Path, bytes_max: int, *, kind: str, hint: str) -> str:
    """A whole file as text, without a byte order mark.

    Raises ConfigError, which says what `kind` of file it should be, and by `hint` what such a one is, if it
    cannot be read, is larger than `bytes_max` or is not UTF-8.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(bytes_max + 1)
        if len(data) > bytes_max:
            raise ConfigError(f"{path} is too large for a {kind}")
        return data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text; a {kind} is {hint}") from None
