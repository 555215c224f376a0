"""What peers that step by themselves tell of what they moved, and what a group makes of it."""
