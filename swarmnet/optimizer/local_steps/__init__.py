"""Sync methods with local steps: each peer runs an optimizer of its own and sends weight deltas."""
