"""Faults from a seed, played on that world, and what must hold of every play."""
