"""Where the values of commands come from, and the check of them before a node starts."""
