"""The bootstrap of a simulated world: it decides which peers find each other in the directory."""

from __future__ import annotations

from protocols.signed.identity import Identity
from swarmnet.identifiers import PeerId

BOOTSTRAP = Identity.from_seed(b"the bootstrap of the world").peer_id


class SimulatedBootstrap:
    """A bootstrap: two peers find each other if both have contacted it between the same two starts."""

    def __init__(self) -> None:
        self.away = False
        self._start = 0
        self._met: dict[PeerId, set[int]] = {}
        """Starts of the bootstrap after which each peer has contacted it."""

    def answer(self, peer: PeerId) -> bool:
        """Add a peer to the table. Returns False while the bootstrap is away."""
        if self.away:
            return False
        self._met.setdefault(peer, set()).add(self._start)
        return True

    def has_met(self, peer: PeerId) -> bool:
        """Return whether the peer has joined before; such a peer knows others and returns through them."""
        return peer in self._met

    def connects(self, peer: PeerId, other: PeerId) -> bool:
        """Return whether these two peers find each other in the directory."""
        return not self._met.get(peer, set()).isdisjoint(self._met.get(other, set()))

    def leave(self) -> None:
        """End the bootstrap's process, and lose its table."""
        self.away = True

    def come_back(self) -> None:
        """Start the bootstrap again, with the same key and port and an empty table."""
        self.away = False
        self._start += 1
