"""Tasks: what a swarm trains (model, data, loss, evaluation). They know nothing of the network.

Start at `gossamer.models.task.Task`, the interface, and `gossamer.models.registry.build_task`,
which makes one of the tasks that come with Gossamer. This file imports nothing, so that a daemon
without PyTorch can live in the same installation.
"""
