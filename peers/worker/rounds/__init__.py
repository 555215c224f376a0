"""A worker's rounds: the shell of the machine in swarmnet/rounds."""
