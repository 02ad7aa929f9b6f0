"""The `gossamer` commands about nodes, one function each.

They import what they need when they run, so that help and mistakes in flags take no longer than Python
itself.
"""


# --- What `gossamer` does for a swarm: one function a command.
