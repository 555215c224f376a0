"""Contributions (momentum, transforms, sparse votes, deltas), and the replica that applies them."""
