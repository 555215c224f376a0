"""Events and their reasons, metrics, the console, and the snapshot of a swarm."""
