"""A model of which a part is trained: which parameters, where they and the others lie, and low-rank factors."""
