"""Account for the privacy of documents whose gradients are clipped and noised.

A document is in one noisy sum per epoch at most. Whichever sums other documents are in, the owner's output of
an epoch is therefore one Gaussian mechanism for this document, and that of the run is `epochs` of them in
sequence. Sums of Gaussian mechanisms are again one, with a standard deviation smaller by the root of their
number (arXiv:1905.02383, corollary 2). Its loss is known exactly (arXiv:1805.06530, theorem 8):

    delta(epsilon) = F(1 / 2s - epsilon s) - exp(epsilon) F(-1 / 2s - epsilon s)

F is the normal distribution function, s the noise multiplier divided by the root of the epochs. Nothing is
gained from drawing documents at random, so nothing depends on how rounds cut them into sums. Two texts are
neighbours if one has an empty document where the other has any document (arXiv:2103.00039, section 2).
"""

from __future__ import annotations

from math import erfc, exp, sqrt

from swarmnet.run.schema import DocumentPrivacy

LARGEST_EPSILON = 700.0
"""Largest epsilon whose exponential is a float."""
LARGEST_NOISE = 1e9
"""Upper end of the search for a noise multiplier."""
HALVINGS = 200
"""Halvings of an interval of floats until it cannot become smaller."""


def delta_of(noise: float, epochs: int, epsilon: float) -> float:
    """Return the delta that belongs to `epsilon` after `epochs`. `noise` is the noise multiplier: standard
    deviation of the noise, divided by the largest norm of a document's gradient."""
    deviation = noise / sqrt(epochs)
    centre, shift = 1 / (2 * deviation), epsilon * deviation
    return _normal(centre - shift) - exp(epsilon) * _normal(-centre - shift)


def epsilon_of(noise: float, epochs: int, delta: float) -> float:
    """Return the smallest epsilon after `epochs`, 0 before the first; at most `LARGEST_EPSILON`."""
    if epochs == 0 or delta_of(noise, epochs, 0.0) <= delta:
        return 0.0
    low, high = 0.0, LARGEST_EPSILON
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(noise, epochs, middle) > delta else (low, middle)
    return high


def noise_multiplier(privacy: DocumentPrivacy) -> float:
    """Return the smallest noise multiplier that keeps epsilon and delta over all epochs."""
    low, high = 0.0, LARGEST_NOISE
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        is_enough = delta_of(middle, privacy.epochs, privacy.epsilon) <= privacy.delta
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def _normal(value: float) -> float:
    """Return the normal distribution function."""
    return erfc(-value / sqrt(2)) / 2
