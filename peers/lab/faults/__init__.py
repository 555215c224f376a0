"""The deterministic world: real workers, a network in memory, a clock that jumps, faults from a seed."""
