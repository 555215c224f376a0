"""Swarms of real processes on this computer: shown, set under fire, reported."""
