"""Reach peers that cannot be dialled directly: relays, dial-back checks, and fresh dials."""
