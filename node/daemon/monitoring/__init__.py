"""What a daemon notices about itself and the swarm, and remembers."""
