"""Peer files, run files and their keys: reading, validation with line numbers, and explanations."""
