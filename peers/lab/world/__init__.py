"""Real workers on a clock that jumps, in a network in memory."""
