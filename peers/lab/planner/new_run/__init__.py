"""Propose a run for a text, a model and machines, and write it into a new folder (`swarmnet new`)."""
