"""How a child process of `multiprocessing` ends, for who is asked to leave once it has.

Up to Python 3.12 what is left to do at its end is done while the error that ends it is at hand. From 3.13 on
it comes when that has been printed and forgotten, and the exit status says the same of an error and of
``sys.exit(1)``. The printing is what can be seen of it.
"""

import sys
import traceback
from multiprocessing.process import BaseProcess
from typing import Any

_errors: list[BaseException | None] = []
_print_exc = traceback.print_exc


def watch() -> None:
    """Take note of the error that ends this process, which is a child."""
    traceback.print_exc = _note_and_print


def _note_and_print(*args: Any, **options: Any) -> None:
    # A script may print errors of its own, and go on.
    if sys._getframe(1).f_code is BaseProcess._bootstrap.__code__:  # type: ignore[attr-defined]
        _errors.append(sys.exc_info()[1])
    _print_exc(*args, **options)


def error() -> BaseException | None:
    """What has ended this process, None if nothing has, or if it was told to exit."""
    return _errors[-1] if _errors else None
