"""A worker's answers to visitors who want text."""
