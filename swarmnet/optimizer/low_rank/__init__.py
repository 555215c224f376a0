"""Low-rank contributions: shared random directions, and an exact orthogonal step."""
