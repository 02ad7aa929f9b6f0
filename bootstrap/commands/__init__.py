"""What `gossamer` does for a swarm: one function a command."""
