"""The tests. A package, so that `python -m tests.sim` and shared helpers work."""
