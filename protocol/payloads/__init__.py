"""What a delta is made of: where tensors lie, how values become bytes, chunks and hashes."""
