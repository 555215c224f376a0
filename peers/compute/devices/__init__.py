"""A stage on several devices: one process for each, and the peer's interface to them."""
