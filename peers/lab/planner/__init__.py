"""Capacity planning: discrete-event simulation of the real pipeline and router."""
