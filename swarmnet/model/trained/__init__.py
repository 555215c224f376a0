"""A model of which a part is trained: which parameters, where all of them lie, and low-rank factors."""
