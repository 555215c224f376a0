"""A worker: one stage, its microbatches, rounds and inference."""
