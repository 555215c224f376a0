"""Choose the next peer of a microbatch: load balancing, and reservations for runs that skip stages."""
