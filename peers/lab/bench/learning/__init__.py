"""What a run learns by each method, beside optimizers that everybody knows: swarmnet bench learning."""
