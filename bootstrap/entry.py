"""The first code that the installed `gossamer` script calls.

Python takes half a second to import the command. Ctrl-C in that time ends it as it ends any program, without
a message: there is nothing to clean up yet.
"""

import signal
import sys


def main() -> None:
    """Import the command, and run it."""
    if sys.platform == "win32":
        sys.exit("Gossamer does not run on Windows: install it inside WSL 2")
    is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # ignored with a shell's `&`
    if is_heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from gossamer.bootstrap import cli

    if is_heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


if __name__ == "__main__":
    main()
