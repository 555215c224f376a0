"""Faults drawn from a seed, injected into that world, and the invariants of every trial."""
