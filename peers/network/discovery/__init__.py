"""Finding others, and being found."""
