"""A whole small swarm on this computer, watched and reported."""
