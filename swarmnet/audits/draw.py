"""What is looked into, after it was committed to, and by whom.

Of members a few windows, by secrets: what nobody but the auditor can compute nobody can aim at. A draw
that all know, as from the digest of the next round's set, is in the hands of whoever contributes last to that
round: it makes its contribution anew until the digest spares it, 1 / (1 - share) times on the mean
(docs/decisions/0033-audits-of-work.md).

Of newcomers everything, and of who has not been found to agree for long (standing.py), by auditors that all
know, so that all can see whether they were audited: drawn from the set of the next round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from swarmnet.audits.commitment import Commitment
from swarmnet.rounds.audits import chance

TURNS = 4
AUDITORS = 2
"""Of each: one may be away, or its friend."""


def is_drawn(secret: bytes, last: Commitment, share: float, peers: int) -> bool:
    """Whether the auditor with this secret looks into the window that ends with this commitment, in a group
    of so many, which together look into `share` of all windows: what that takes of their computing."""
    return chance(secret, b"work" + last.written()) < share / max(1, peers - 1)


def is_turn(peer: bytes, next_set: bytes) -> bool:
    """Of who has not been found to agree for long, whether the window after which that settled is looked
    into: one of TURNS, so that what is found is heard before the next."""
    return hashlib.sha256(peer + next_set).digest()[0] < 256 // TURNS


def auditors_of(
    peer: bytes, next_set: bytes, members: Iterable[bytes], count: int = AUDITORS
) -> tuple[bytes, ...]:
    """Of a window of that peer, as tags (`tag_of`). `next_set`: names what settled up to the round after its
    last."""

    def place(member: bytes) -> bytes:
        return hashlib.sha256(next_set + peer + b"/" + member).digest()

    return tuple(sorted((member for member in members if member != peer), key=place)[:count])
