"""The decoder, a stage's forward and backward, its flat layout, sampling, and what it costs."""
