"""How many tokens a signed envelope says it stands for, in the number that only records and receipts need.

A contribution says how many tokens its gradient is of, a snapshot's root how many all settled rounds up to it
had. Programs from before wrote the round there, which is below 2^32: they say nothing of tokens.
"""

from __future__ import annotations

_TOLD = 1 << 63


def told(tokens: int | None, round: int) -> int:
    """The envelope's sequence. None: not known; then it is the round, as before."""
    return round if tokens is None else _TOLD | min(tokens, _TOLD - 1)


def tokens_in(sequence: int) -> int | None:
    """What a verified envelope's sequence says; None: nothing."""
    return sequence ^ _TOLD if sequence & _TOLD else None
