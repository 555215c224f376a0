"""Live view of a swarm, from a running peer, the directory or event logs."""
