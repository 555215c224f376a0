"""Drives the state machine in swarmnet/rounds: a worker's rounds."""
