"""Watching: one picture of a swarm, from a running peer, from the directory or from event logs."""
