"""Interfaces between a peer's links (its neighbourhood) and its roles, and the rules of admission.

A neighbour is a peer to which this one keeps a link. An invite, signed by the owner, admits a peer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from protocols.fields import Body
from protocols.messages.table import Message
from protocols.signed.records import SignedRecord
from swarmnet.identifiers import PeerId


@dataclass(frozen=True, slots=True)
class HeartbeatLoad:
    """The load that a heartbeat reports."""

    stage: int
    ready: bool
    slots: int
    service_seconds: float
    round: int
    moving_to: int = -1


class Listener(Protocol):
    """The peer's roles, as the neighbourhood sees them."""

    def met(self) -> Collection[PeerId]:
        """Return peers known to answer by other means. Dialling them contacts no new address."""

    def own_record(self, signed: SignedRecord) -> None:
        """Called with each record that this peer's own key has signed."""

    def answer_visitor(self, peer: PeerId, message: Message, body: Body) -> None:
        """Send a response to a peer without links, over a link that is opened back."""

    def load(self) -> HeartbeatLoad: ...

    def linked(self, peer: PeerId, stage: int) -> None:
        """Called when messages can be sent to a neighbour."""

    def unlinked(self, peer: PeerId, reason: str, released: bool) -> None:
        """Called when a neighbour is lost, silent or gone, or when no side needs the link (`released`)."""

    def counted(self, peers: int) -> None:
        """Called with the number of known peers in this peer's own group, itself included."""

    def on_stall(self, seconds: float) -> None:
        """Called when this process did not run for this many seconds."""

    def beat(self, peer: PeerId) -> None:
        """Called after a heartbeat of this peer, which may have become ready."""

    def message(self, peer: PeerId, message: Message, body: bytes) -> None:
        """Called for any message that is not about the neighbourhood itself."""


class Admission(Protocol):
    """Decides which peers the run's owner admits."""

    @property
    def invite(self) -> bytes:
        """The invite that this peer shows to others."""

    def refusal(self, peer: PeerId, invite: bytes) -> tuple[str, str] | None:
        """Return code and reason why a peer with this invite is refused, or None."""

    def invited(self, peer: PeerId, invite: bytes) -> bool:
        """Return True if the run is open, or the peer admitted by its record's invite or an earlier one."""

    def shuns(self, peer: PeerId) -> bool:
        """Return True if the peer must not be dialled either."""

    def evidence(self) -> list[Message]:
        """Return the messages that prove to a refused peer that the owner excludes it."""

    @property
    def by_invite(self) -> bool:
        """True if nothing is sent to peers that have not shown an invite."""


class OpenToAll:
    """The `Admission` of a run without orders and invites."""

    invite, by_invite = b"", False

    def refusal(self, peer: PeerId, invite: bytes) -> tuple[str, str] | None:
        return None

    def invited(self, peer: PeerId, invite: bytes) -> bool:
        return True

    def shuns(self, peer: PeerId) -> bool:
        return False

    def evidence(self) -> list[Message]:
        return []
