"""Adapters that make a training framework's own loop a node of a swarm; one file per framework."""
