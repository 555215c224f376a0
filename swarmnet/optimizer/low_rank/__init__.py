"""Matrices told by few columns: directions that all know, and the exact orthogonal step of a set."""
