"""How peers that nobody can dial are reached: relays, dial-back, fresh dials."""
