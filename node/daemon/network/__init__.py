"""Links with other nodes: one port, TLS, connection limits, frames, chunks, questions."""
