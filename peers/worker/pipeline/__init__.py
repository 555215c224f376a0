"""Drives the state machine in swarmnet/pipeline: a worker's microbatches."""
