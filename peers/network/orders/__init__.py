"""Receive, apply and republish the orders of the run's owner."""
