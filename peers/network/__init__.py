"""A peer's view of the network: its neighbours, their addresses, and the links to them."""
