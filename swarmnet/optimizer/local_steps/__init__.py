"""Methods with local optimizer steps between rounds, and the deltas that they send."""
