"""What a peer tells: events and their reasons, metrics, the console, the snapshot of a swarm."""
