"""Group membership: signed records and heartbeats, whom to dial, and the overlay of a large group."""
