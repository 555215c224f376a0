"""The compute thread, its devices, and what of the machine it may have."""
