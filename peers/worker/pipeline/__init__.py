"""Leaving out stages judged: topologies, play of microbatches, plans that a search finds, the bench."""
