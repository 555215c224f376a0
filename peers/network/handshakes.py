"""Track which peers have sent `Hello`, and which must send a message before they count as linked.

The latter are those that were dropped for silence, and new ones. An opened stream proves nothing. On an
existing connection, libp2p opens streams at once, even if the other process is stopped or unreachable."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Mapping
from contextlib import suppress

from swarmnet.identifiers import PeerId
from swarmnet.membership.membership import MAX_PEERS
from swarmnet.membership.peer_info import PeerInfo

MAX_GREETED = MAX_PEERS
"""Maximum number of peers whose messages are accepted, visitors included. An entry takes about 200 bytes."""


class Handshakes(dict[PeerId, asyncio.Event]):
    """Maps each peer that must send a message to an event. Its message removes the entry and sets it."""

    def __init__(self) -> None:
        super().__init__()
        self.greeted: dict[PeerId, None] = {}
        """Peers that have sent `Hello`, in order of arrival. Their messages are accepted."""

    def greet(self, peer: PeerId, known: Mapping[PeerId, PeerInfo]) -> None:
        """Accept this peer's messages from now on. Beyond `MAX_GREETED` peers, forget the oldest one without
        a link, or `peer` itself if all have links."""
        self.greeted[peer] = None
        if len(self.greeted) > MAX_GREETED:
            unlinked = (each for each in self.greeted if each not in known or not known[each].linked)
            del self.greeted[next(unlinked, peer)]

    def message_arrived(self, peer: PeerId) -> None:
        """Stop waiting for a message of this peer."""
        event = self.pop(peer, None)
        if event is not None:
            event.set()

    def keep(self, peers: Container[PeerId]) -> None:
        """Wait no more for messages of all peers except these."""
        for peer in [peer for peer in self if peer not in peers]:
            del self[peer]

    async def speaks(self, peer: PeerId, seconds: float) -> bool:
        """Wait for the peer's message if one is required. Returns False if none comes in `seconds`."""
        event = self.get(peer)
        if event is None:
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
        return event.is_set()
