"""What is looked into, after it was committed to, and by whom.

Of members a few windows, by secrets: what nobody but the auditor can compute nobody can aim at. A draw
that all know, as from the digest of the next round's set, is in the hands of whoever contributes last to that
round: it makes its contribution anew until the digest spares it, 1 / (1 - share) times on the mean
(docs/decisions/0033-audits-of-work.md).

Of newcomers everything, by auditors that all know, so that all can see whether they were audited: drawn from
the set of the next round, in which a newcomer does not count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from swarmnet.audits.commitment import Commitment
from swarmnet.identifiers import PeerId
from swarmnet.rounds.audits import chance

NEWCOMERS_AUDITORS = 2
"""Of each: one may be away, or the newcomer's friend."""


def is_drawn(secret: bytes, last: Commitment, share: float, peers: int) -> bool:
    """Whether the auditor with this secret looks into the window that ends with this commitment, in a group
    of so many, which together look into `share` of all windows: what that takes of their computing."""
    return chance(secret, b"work" + last.written()) < share / max(1, peers - 1)


def auditors_of(
    newcomer: PeerId, next_set: bytes, members: Iterable[PeerId], count: int = NEWCOMERS_AUDITORS
) -> tuple[PeerId, ...]:
    """Of a newcomer's window. `next_set`: digest of what settled for the round after its last."""

    def place(member: PeerId) -> bytes:
        return hashlib.sha256(next_set + newcomer.encode() + b"/" + member.encode()).digest()

    return tuple(sorted((member for member in members if member != newcomer), key=place)[:count])
