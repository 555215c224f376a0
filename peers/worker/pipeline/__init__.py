"""A worker's microbatches: the driver of the state machine in swarmnet/pipeline."""
