"""A node's folder and what is in it: small files, chunks, records."""
