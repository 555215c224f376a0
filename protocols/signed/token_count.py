"""Store a token count in the sequence of a signed envelope, which otherwise only records and receipts use.

A contribution stores the number of tokens of its gradient. A snapshot root stores the number of tokens of all
settled rounds up to it. Earlier programs wrote the round there, which is below 2^32; it means no token count.
"""

from __future__ import annotations

_HAS_TOKENS = 1 << 63


def encode_tokens(tokens: int | None, round: int) -> int:
    """Return the envelope's sequence: the round if `tokens` is None, as in earlier programs."""
    return round if tokens is None else _HAS_TOKENS | min(tokens, _HAS_TOKENS - 1)


def tokens_in(sequence: int) -> int | None:
    """Return the token count in a verified envelope's sequence, or None if it has none."""
    return sequence ^ _HAS_TOKENS if sequence & _HAS_TOKENS else None
