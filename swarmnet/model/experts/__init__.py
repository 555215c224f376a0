"""A mixture of experts for a feed-forward: what a token gets of them, and how alike ones are merged."""
