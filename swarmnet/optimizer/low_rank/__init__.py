"""Matrices told by few columns: a subspace that all know, what peers say in it, and the exact step of a set."""
