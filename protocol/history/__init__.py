"""Time: the swarm's clock of rounds, who joins from which snapshot, what is sealed, closed and given up."""
