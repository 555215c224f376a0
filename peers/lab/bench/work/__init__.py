"""Peers that contribute other work than they say: who finds them, and what becomes of the model."""
