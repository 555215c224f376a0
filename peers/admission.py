"""Who may be a neighbour: what the neighbourhood asks whoever knows the run's invites and bans."""

from __future__ import annotations

from typing import Protocol

from protocols.messages import Message
from swarmnet.identifiers import PeerId


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
