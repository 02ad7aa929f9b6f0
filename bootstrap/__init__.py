"""How a swarm begins: writing manifests, the bootstrap peer, and the local multi-process swarm."""
