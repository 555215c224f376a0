"""The definition of a run: its manifest, the legal paths, and the orders of its owner."""
