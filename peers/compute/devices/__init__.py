"""A stage on several devices: a process for each, and this peer's side of them."""
