"""What tests of agreement begin from: correlated votes."""

import numpy as np

NUMBERS = 4096


def votes(honest, numbers=NUMBERS, errors=0.3, seed=0):
    """Votes of honest peers, int8 [honest, numbers]. Each has some wrong. Then the right votes."""
    generator = np.random.default_rng(seed)
    right_N = generator.choice(np.array([-1, 1], np.int8), numbers)
    wrong_CN = generator.random((honest, numbers)) < errors
    return np.where(wrong_CN, -right_N, right_N).astype(np.int8), right_N
