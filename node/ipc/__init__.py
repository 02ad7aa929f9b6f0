"""Between a node's two processes: shared memory, and messages over a socket, with both of its ends."""
