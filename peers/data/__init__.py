"""A run's text on this machine: which files, which documents in them, and their tokens on the disk."""
