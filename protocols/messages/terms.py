"""Limits on what a receiver accepts: the largest body of each kind, and which peers may send bodies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from protocols.messages.table import BODY_LIMIT, MESSAGES, Message
from swarmnet.identifiers import PeerId

Bodies = Mapping[type[Message], int]
"""Largest body in bytes of each kind of message. A kind that is missing may have no body."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a receiver accepts. Before a peer's `Hello`, it accepts only headers, for a few seconds."""

    bodies: Bodies
    greeted: Callable[[PeerId], bool] = lambda peer: True
    """Return True if the peer has sent `Hello`, or if we dialled it and it may answer."""

    def limit(self, peer: PeerId, message: Message) -> int:
        """Return the largest body in bytes that a peer may send with this message."""
        return self.bodies.get(type(message), 0) if self.greeted(peer) else 0

    @property
    def longest(self) -> int:
        """Return the size in bytes of the largest body that is accepted of any kind."""
        return max(self.bodies.values(), default=0)


ANYTHING = Terms({kind: BODY_LIMIT for kind in MESSAGES if kind.body})
"""Terms of a receiver that knows no run, such as measurements and tests between a user's own peers."""
