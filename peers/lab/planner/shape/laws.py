"""What many replicas, large batches and few tokens cost in loss: published fits, until our bench has its own.

All constants of that kind stand here and nowhere else. Losses in nats per token. What they are not: fitted on
our method. DiLoCo's law is one of AdamW and an outer momentum with up to 8 replicas, and is used far outside
of that.
"""

from __future__ import annotations

from math import inf, pow

REPLICAS_EXPONENT = 0.0116
"""The loss of M replicas with steps of their own, times that of one: M ^ 0.0116. DiLoCo's joint law
L = 19.226 N^-0.0985 M^0.0116, fitted for M up to 8 and N up to 2.4e9 (arXiv 2503.09799)."""
FITTED_REPLICAS = 8
IRREDUCIBLE, PARAMETERS_TERM, TOKENS_TERM = 1.69, 406.4, 410.7
PARAMETERS_EXPONENT, TOKENS_EXPONENT = 0.34, 0.28
"""L(N, D) = 1.69 + 406.4 / N^0.34 + 410.7 / D^0.28 (Hoffmann et al. 2022, arXiv 2203.15556, section 3.3)."""
TOKENS_PER_PARAMETER = 20
"""What is trained for where nothing else is asked: Hoffmann et al. 2022, as a rule of thumb."""
BATCH_SEQUENCES, BATCH_PARAMETERS_EXPONENT, BATCH_REPLICAS_EXPONENT = 0.00709, 0.4695, 0.3399
SEQUENCE_TOKENS = 2048
"""The best step of all replicas together: 0.00709 N^0.4695 M^0.3399 sequences of 2,048 tokens (arXiv
2503.09799; the unit is how its figures read, its text says tokens)."""
MAX_LOCAL_STEPS = 300
"""Between two exchanges: more were not tried there. That loss rises with them slowly, and less in large
models, is said without a figure that could stand here."""
FEW_ROUNDS = 100
"""A run of fewer is worth a word: ours, not published; schedules and late joiners are made for hundreds."""
CRITICAL_BATCH_TOKENS, CRITICAL_BATCH_EXPONENT = 2e8, 1 / 0.21
"""A batch that is stepped at once as large as 2e8 / L^(1/0.21) tokens takes twice the tokens of a small one
to the same loss (Kaplan et al. 2020, arXiv 2001.08361, section 5.1, after McCandlish et al. 2018)."""


def loss_of_one(parameters: int, tokens: float) -> float:
    """Of one replica with well-chosen batches."""
    return _least(parameters) + TOKENS_TERM / pow(tokens, TOKENS_EXPONENT)


def _least(parameters: int) -> float:
    """With any number of tokens."""
    return IRREDUCIBLE + PARAMETERS_TERM / pow(parameters, PARAMETERS_EXPONENT)


def loss_factor(replicas: float) -> float:
    """Of replicas that take steps of their own, at as many tokens in all."""
    return pow(max(1.0, replicas), REPLICAS_EXPONENT)


def tokens_factor(parameters: int, tokens: float, factor: float) -> float:
    """How many times the tokens it takes to come to the same loss, where loss is so many times as high at
    equal tokens; inf: no number of tokens does."""
    left = loss_of_one(parameters, tokens) / factor - _least(parameters)
    if left <= 0:
        return inf
    return pow(TOKENS_TERM / left, 1 / TOKENS_EXPONENT) / tokens


def inner_batch_tokens(parameters: int, replicas: float) -> float:
    """The best step of each of the replicas, in tokens."""
    sequences = pow(parameters, BATCH_PARAMETERS_EXPONENT) * pow(replicas, BATCH_REPLICAS_EXPONENT)
    return BATCH_SEQUENCES * sequences * SEQUENCE_TOKENS / replicas


def batch_factor(parameters: int, tokens: float, batch: float) -> float:
    """How many times the tokens it takes to the same loss with steps of so many tokens at once."""
    critical = CRITICAL_BATCH_TOKENS / pow(loss_of_one(parameters, tokens), CRITICAL_BATCH_EXPONENT)
    return 1 + batch / critical
