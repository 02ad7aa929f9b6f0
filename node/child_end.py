"""How a child process of `multiprocessing` ends, for a peer that leaves at its end.

Up to Python 3.12, finalizers run while the error that ends the process is at hand. From 3.13 on, they run
when that error has been printed and forgotten, and the exit status is the same for an error and for
``sys.exit(1)``. Only the printing can be observed.
"""

import sys
import traceback
from multiprocessing.process import BaseProcess
from typing import Any

_errors: list[BaseException | None] = []
_print_exc = traceback.print_exc


def watch() -> None:
    """Take note of the error that will end this child process."""
    traceback.print_exc = _note_and_print


def _note_and_print(*args: Any, **options: Any) -> None:
    # Only what multiprocessing prints: a script may print errors itself, and go on.
    if sys._getframe(1).f_code is BaseProcess._bootstrap.__code__:  # type: ignore[attr-defined]
        _errors.append(sys.exc_info()[1])
    _print_exc(*args, **options)


def error() -> BaseException | None:
    """The error that has ended this process; None if there was none, or if it was told to exit."""
    return _errors[-1] if _errors else None
