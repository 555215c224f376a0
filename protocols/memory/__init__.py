"""In-memory transport and directory for tests and simulations, without a network."""
