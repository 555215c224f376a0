"""Weights at rest and on their way to a newcomer: checkpoints, snapshots, archives."""
