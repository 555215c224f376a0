"""Real workers on a virtual clock and an in-memory network."""
