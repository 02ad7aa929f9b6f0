"""Between a node's two processes: shared memory, messages over a socket, both of its ends."""
