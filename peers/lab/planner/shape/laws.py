"""Scaling laws: the cost in loss of large batches and few tokens, from published fits.

Losses are in nats per token. What the sync methods cost is not published: each has a law that was fitted to
this project's trials (`swarmnet/run/loss_law.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, pow, sqrt

IRREDUCIBLE, PARAMETERS_TERM, TOKENS_TERM = 1.69, 406.4, 410.7
PARAMETERS_EXPONENT, TOKENS_EXPONENT = 0.34, 0.28
"""L(N, D) = 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28 (Hoffmann et al. 2022, arXiv 2203.15556, section 3.3)."""
TOKENS_PER_PARAMETER = 20
"""Default number of training tokens per parameter: the rule of thumb of Hoffmann et al. 2022."""
BATCH_SEQUENCES, BATCH_PARAMETERS_EXPONENT, BATCH_REPLICAS_EXPONENT = 0.00709, 0.4695, 0.3399
SEQUENCE_TOKENS = 2048
"""The best batch of all replicas together is 0.00709 N^0.4695 M^0.3399 sequences of 2,048 tokens.

From arXiv 2503.09799; the unit follows from its figures, although its text has tokens."""
MAX_LOCAL_STEPS = 300
"""Maximum number of local steps between two exchanges; the paper tried no more.

It states without figures that loss rises slowly with their number, and less in large models."""
FEW_ROUNDS = 100
"""A run with fewer rounds causes a warning; schedules and joining peers are made for hundreds. Our choice,
not published."""
CRITICAL_BATCH_TOKENS, CRITICAL_BATCH_EXPONENT = 2e8, 1 / 0.21
"""Critical batch size: 2e8 / L^(1/0.21) tokens. A batch of this size needs twice the tokens of a small batch
to the same loss (Kaplan et al. 2020, arXiv 2001.08361, section 5.1, after McCandlish et al. 2018)."""

MAX_TOKENS_FACTOR = 1e4
"""Factor of the tokens above which a run counts as one that never reaches the loss. Our choice: a plan of a
thousand times the tokens is of no use."""
FACTOR_TOLERANCE = 1.0001
"""Precision of the factor; the laws' errors are per cents."""


def loss_of_one(parameters: int, tokens: float) -> float:
    """Return the loss of one replica with well-chosen batches."""
    return _least(parameters) + TOKENS_TERM / pow(tokens, TOKENS_EXPONENT)


def _least(parameters: int) -> float:
    """Return the lower bound of the loss for any number of tokens."""
    return IRREDUCIBLE + PARAMETERS_TERM / pow(parameters, PARAMETERS_EXPONENT)


def tokens_factor(parameters: int, tokens: float, ratio: Callable[[float], float]) -> float:
    """Return by which factor the tokens grow to reach the same loss; inf if no number of tokens reaches it.

    `ratio`: the loss divided by that of AdamW at equal tokens, after this factor of the tokens. It does not
    rise with the factor: who trains longer also sends more.
    """

    def reaches(factor: float) -> bool:
        return loss_of_one(parameters, tokens * factor) * ratio(factor) <= wanted

    wanted = loss_of_one(parameters, tokens)
    low, high = 1 / MAX_TOKENS_FACTOR, MAX_TOKENS_FACTOR
    if not reaches(high):
        return inf
    while high > FACTOR_TOLERANCE * low:
        middle = sqrt(low * high)
        if reaches(middle):
            high = middle
        else:
            low = middle
    return high


def inner_batch_tokens(parameters: int, replicas: float) -> float:
    """Return the best batch of each replica, in tokens."""
    sequences = pow(parameters, BATCH_PARAMETERS_EXPONENT) * pow(replicas, BATCH_REPLICAS_EXPONENT)
    return BATCH_SEQUENCES * sequences * SEQUENCE_TOKENS / replicas


def batch_factor(parameters: int, tokens: float, batch: float) -> float:
    """Return by which factor the tokens to the same loss grow with steps of `batch` tokens."""
    critical = CRITICAL_BATCH_TOKENS / pow(loss_of_one(parameters, tokens), CRITICAL_BATCH_EXPONENT)
    return 1 + batch / critical
