"""A worker: a peer that loads one pipeline stage and trains it."""
