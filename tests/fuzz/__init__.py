"""Fuzzing: whatever bytes arrive, only typed errors, bounded memory, no hang."""
