"""Decides which stage a peer serves, and when it moves to another."""
