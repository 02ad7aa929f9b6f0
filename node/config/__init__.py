"""Where the values of commands come from, and what is wrong with them before a node starts."""
