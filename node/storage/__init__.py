"""A node's folder and what lies in it: small files, chunks, records."""
