"""Adapters: a training framework's own loop as a node of a swarm, one file a framework."""
