"""A worker's service for inference clients: forward passes of its stage."""
