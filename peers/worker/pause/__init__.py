"""Pausing a worker: the reasons, how long they last, and what the peer still does meanwhile."""
