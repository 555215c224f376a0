"""A worker's microbatches: the shell of the machine in swarmnet/pipeline."""
