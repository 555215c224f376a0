"""Downloads in chunks: snapshots of weights, and files of the run's text."""
