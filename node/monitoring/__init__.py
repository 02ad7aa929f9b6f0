"""What a daemon notices of itself and of the swarm, and remembers."""
