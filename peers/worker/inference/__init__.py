"""A worker's answers to inference clients."""
