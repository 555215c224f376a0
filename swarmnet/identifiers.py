"""Names of things that cross the wire. Distinct types, so that they cannot be swapped."""

from __future__ import annotations

from typing import NamedTuple, NewType

PeerId = NewType("PeerId", str)
"""A libp2p peer id of an Ed25519 key in base58, e.g. `12D3Koo...`; it contains the public key."""

RunId = NewType("RunId", str)
"""SHA-256 of the run's canonical manifest: 64 hexadecimal digits."""

RUN_DIGITS = 16
"""First digits of a run id that name its state folder: 64 bits do not meet by chance. On a machine that took
part before, `swarmnet join` needs no more."""

ContributionId = NewType("ContributionId", bytes)
"""First 16 bytes of SHA-256 over a contribution's signed statement: names one peer's one contribution."""


class MicrobatchId(NamedTuple):
    """The unit of work: who started it, and that peer's counter (from 0, never reused in a run)."""

    origin: PeerId
    counter: int
