"""Weights on disk and in transfer to newcomers: checkpoints, snapshots, archives."""
