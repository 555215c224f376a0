"""Pause and resume a worker, and what it keeps meanwhile."""
