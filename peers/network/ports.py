"""What a neighbourhood tells the roles of its peer, what it asks of them, and whom it may let in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from protocols.messages.table import Message
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

    def stood_still(self, seconds: float) -> None:
        """This process did not run for so long."""

    def beat(self, peer: PeerId) -> None:
        """It said how it is: it may have become ready."""

    def message(self, peer: PeerId, message: Message, body: bytes) -> None:
        """Anything that is not about the neighbourhood itself."""


class Admission(Protocol):
    """Whom the run's owner lets in."""

    @property
    def invite(self) -> bytes:
        """What this peer shows to others."""

    def refusal(self, peer: PeerId, invite: bytes) -> tuple[str, str] | None:
        """Code and reason why a peer that greets with this invite is not spoken to."""

    def invited(self, peer: PeerId, invite: bytes) -> bool:
        """Whether this invite in its record, or one that was seen before, lets it in; True where the
        run is open to all."""

    def shuns(self, peer: PeerId) -> bool:
        """Whether it is not to be dialled either."""

    def evidence(self) -> list[Message]:
        """What shows a peer that is turned away that the owner wants it."""

    @property
    def by_invite(self) -> bool:
        """Whether nothing is sent to who has not shown its invite."""


class OpenToAll:
    """`Admission` of a run without orders and invites."""

    invite, by_invite = b"", False

    def refusal(self, peer: PeerId, invite: bytes) -> tuple[str, str] | None:
        return None

    def invited(self, peer: PeerId, invite: bytes) -> bool:
        return True

    def shuns(self, peer: PeerId) -> bool:
        return False

    def evidence(self) -> list[Message]:
        return []
