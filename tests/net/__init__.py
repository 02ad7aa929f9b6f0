"""Real processes on loopback: whole swarms, faults, and what strangers send to a port."""
