"""Telemetry of a peer: events and their reasons, metrics, the console, the snapshot of a swarm."""
