"""How a peer computes its stage as it chooses to, and what follows from that."""
