"""Search for the best shape of a run for given peers: by arithmetic, then by simulation."""
