"""Links with other nodes: one port, TLS, the guard at the door, frames, chunks, questions."""
