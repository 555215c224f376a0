"""Identifiers that messages carry. They are distinct types, so that a type checker notices swaps."""

from __future__ import annotations

from typing import NamedTuple, NewType

PeerId = NewType("PeerId", str)
"""The libp2p peer id of an Ed25519 key in base58, e.g. `12D3Koo...`. It contains the public key."""

RunId = NewType("RunId", str)
"""The SHA-256 of the run's canonical manifest, as 64 hexadecimal digits."""

RUN_DIGITS = 16
"""Number of leading digits of a run id that name its state folder: 64 bits do not collide by chance.
`swarmnet join` needs no more of them on a machine that took part in the run before."""

ContributionId = NewType("ContributionId", bytes)
"""The first 16 bytes of SHA-256 over a contribution's signed statement. It names one contribution."""


class MicrobatchId(NamedTuple):
    """Names one microbatch: the peer that started it, and its counter (from 0, never reused in a run)."""

    origin: PeerId
    counter: int
