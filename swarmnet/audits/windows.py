"""When a peer that steps by itself begins afresh: from there on what it contributes follows from what others
can have.

Its moments and what it moved and did not tell are its own business, and whoever wants to compute its work
again does not have them. So each peer begins afresh after every `sync.afresh_rounds` rounds: its moments are
nothing then, and what it had not told it carries over in a form short enough to be given to an auditor. The
rounds between two such beginnings are a *window*: whoever replays one begins where the peer did, and ends
with what it carries on.
"""

from __future__ import annotations

import hashlib

from swarmnet.identifiers import PeerId


def window_of(round: int, peer: PeerId, every: int) -> int:
    """The number of the window that this round of a peer is in. Peers have their turn at different rounds, so
    that they are not all cold at once."""
    turn = int.from_bytes(hashlib.sha256(peer.encode()).digest()[:8], "big") % every
    return (round + turn) // every


def ends_window(round: int, peer: PeerId, every: int) -> bool:
    """Whether the peer begins afresh after its contribution to this round; never where `every` is 0."""
    return every > 0 and window_of(round, peer, every) != window_of(round + 1, peer, every)
