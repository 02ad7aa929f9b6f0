"""The exit statuses of our processes, for whatever started them: the supervisor, systemd, a script."""

DONE = 0

FAILED = 1
"""The next attempt may succeed: the disk is full, a file is out of reach, or there is a bug of ours."""

USER_ERROR = 2
"""A person has to fix something first: the next attempt would end in the same way."""

DISK_FULL = 3
"""Used only by the process that rebuilds Phi_0. Its parent reports the full disk, and ends with `FAILED`."""

INTERRUPTED = 130
"""Ctrl-C: 128 plus the number of SIGINT, as in shells."""
