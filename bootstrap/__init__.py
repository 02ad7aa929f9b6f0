"""How a swarm begins: manifests, the bootstrap peer, and the local swarm of several processes."""
