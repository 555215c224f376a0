"""What a pipeline service reports about its microbatches to the reservation of places, where none is made."""

from __future__ import annotations

from peers.network.peer_links import PeerLinks
from protocols.messages.table import Message
from swarmnet.identifiers import MicrobatchId, PeerId


class NoReservations:
    """The form for runs that skip no stages: nothing is reserved. `ReservationClient` is the other one."""

    refused = 0
    """Number of own requests that were refused."""

    def __init__(self, neighbourhood: PeerLinks) -> None:
        self.neighbourhood = neighbourhood

    def close(self) -> None:
        """Stop reporting."""

    def computed(self, forward_seconds: float, backward_seconds: float) -> None:
        """Record the duration of a pass; the other one is 0."""

    def begins(self, key: MicrobatchId) -> None:
        """Called when the forward pass is submitted to the compute thread."""

    def came(self, peer: PeerId, key: MicrobatchId) -> None:
        """Called when the body of a microbatch was accepted from the peer that sent it last."""

    def hands_up(self, peer: PeerId, key: MicrobatchId, attempt: int, seconds: float) -> None:
        """Tell the previous peer how long the microbatch was here; called before its gradient is sent
        there."""

    def answered(self, peer: PeerId, key: MicrobatchId, attempt: int, seconds: float) -> None:
        """Called when its gradient arrives, `seconds` after its body was sent; updates the estimated network
        delay."""

    def done(self, key: MicrobatchId) -> None:
        """Called when a microbatch is committed."""

    def drop(self, key: MicrobatchId) -> None:
        """Drop a microbatch and cancel its reservations on later stages."""

    def lost(self, peer: PeerId) -> None:
        """Called when the link to a peer is lost: drop its microbatches and search other paths for those sent
        to it."""

    def given_back(self, peer: PeerId, key: MicrobatchId) -> None:
        """Drop the place of a microbatch that the requesting peer no longer needs."""

    def message(self, peer: PeerId, message: Message, serving: bool) -> None:
        """Handle a message about reservations; `serving` is whether this peer accepts microbatches."""
        reason = "a path-reservation message, but this run skips no stages (paths.skip_ratio: 0)"
        self.neighbourhood.refused(peer, "malformed", reason)
