"""What the exit status of one of our processes says to who started it: the supervisor, systemd, a script."""

DONE = 0

FAILED = 1
"""The next attempt may go well: the disk is full, a file is out of reach, or it is a bug of ours."""

USER_ERROR = 2
"""A person has to mend something first: the next attempt would end in the same way."""

DISK_FULL = 3
"""Only of the process that rebuilds Phi_0: its parent says so for it, and ends with `FAILED`."""

INTERRUPTED = 130
"""Ctrl-C: 128 and the number of SIGINT, as shells have it."""
