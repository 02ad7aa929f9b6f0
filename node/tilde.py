"""``~`` in paths that no shell has expanded: in a file, in an environment set by a file, in ``--dir=~/x``."""

from pathlib import Path


def expanded(path: Path) -> Path:
    """A path with its tilde expanded; unchanged if the home folder is not known.

    Otherwise a folder named ``~`` would be created, and a person who removed it by that name would remove
    their home.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        return path
