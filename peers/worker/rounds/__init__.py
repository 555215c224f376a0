"""A worker's rounds: the driver of the state machine in swarmnet/rounds."""
