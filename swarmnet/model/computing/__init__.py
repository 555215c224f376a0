"""How a peer computes its stage: options, gradient sums, and weights on one or several devices."""
