"""A run's text on this machine: its files, documents and stored tokens."""
