"""What a delta is made of: where tensors lie, and how values become bytes, chunks and hashes."""
