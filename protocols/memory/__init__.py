"""Transport and directory without a network."""
