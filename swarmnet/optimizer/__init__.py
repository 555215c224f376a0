"""Contributions: momentum, transform, sparse values, votes; and the replica that applies them."""
