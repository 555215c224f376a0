"""Real peers killed, frozen and replaced while they train, and the report of what was kept."""
