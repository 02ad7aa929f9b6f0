"""``~`` in paths that no shell has seen: in a file, in an environment that a file sets, behind ``--dir=``."""

from pathlib import Path


def expanded(path: Path) -> Path:
    """A path with the home folder for its tilde; as it is where nobody knows that folder.

    Whoever found a folder named ``~`` one day, and removed it as it is written, would remove their home.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        return path
