"""Mixture of experts as a feed-forward layer: routing, load, and merging of similar experts."""
