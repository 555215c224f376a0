"""What runs: the peer process, its roles, the command line, configuration and metrics."""
