"""What a neighbourhood tells the roles of its peer, and what it asks of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from protocols.messages import Message
from swarmnet.identifiers import PeerId


@dataclass(frozen=True, slots=True)
class Load:
    """What a beat says of this peer."""

    stage: int
    ready: bool
    slots: int
    service_seconds: float
    round: int
    moving_to: int = -1


class Listener(Protocol):
    """The peer's roles, as the neighbourhood sees them."""

    def load(self) -> Load: ...

    def linked(self, peer: PeerId, stage: int) -> None:
        """A neighbour can be sent to."""

    def unlinked(self, peer: PeerId, reason: str, released: bool) -> None:
        """It is lost, silent, or has left; or neither side needs the link any more: `released`."""

    def counted(self, peers: int) -> None:
        """So many are known of the own group, this peer included."""

    def beat(self, peer: PeerId) -> None:
        """It said how it is: it may have become ready."""

    def message(self, peer: PeerId, message: Message, body: bytes) -> None:
        """Anything that is not about the neighbourhood itself."""
