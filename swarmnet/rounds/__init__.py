"""A group's rounds: whose contributions count, when a set is settled, and what forks come to."""
