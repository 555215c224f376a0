"""Inference requests of clients through the stages, and the queue in which they wait at a peer."""
