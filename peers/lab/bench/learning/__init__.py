"""Learning curves of each method against standard optimizers (`swarmnet bench learning`)."""
