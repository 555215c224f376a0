"""Track which peers have sent `Hello`, and which must send a message before they count as linked.

The latter are those that were dropped for silence, and new ones. An opened stream proves nothing. On an
existing connection, libp2p opens streams at once, even if the other process is stopped or unreachable."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from swarmnet.identifiers import PeerId
from swarmnet.membership.membership import MAX_PEERS, PeerInfo

MAX_GREETED = MAX_PEERS
"""Maximum number of peers whose messages are accepted, visitors included. An entry takes about 200 bytes."""


class Handshakes:
    """The handshakes of one peer with others."""

    def __init__(self, known: Mapping[PeerId, PeerInfo]) -> None:
        """`known` has the peers of the membership."""
        self._known = known
        self.greeted: dict[PeerId, None] = {}
        """Peers that have sent `Hello`, in order of arrival. Their messages are accepted."""
        self._pending: dict[PeerId, asyncio.Event] = {}
        """Maps each peer that must send a message to an event, which is set then."""

    def greet(self, peer: PeerId) -> None:
        """Accept this peer's messages from now on. Beyond `MAX_GREETED` peers, forget the oldest one without
        a link, or `peer` itself if all have links."""
        self.greeted[peer] = None
        if len(self.greeted) > MAX_GREETED:
            known = self._known
            unlinked = (each for each in self.greeted if each not in known or not known[each].linked)
            del self.greeted[next(unlinked, peer)]

    def part(self, peer: PeerId) -> None:
        """Accept this peer's messages no more."""
        self.greeted.pop(peer, None)

    def forget(self, peer: PeerId) -> None:
        """Forget a peer that has left."""
        self.part(peer)
        self._pending.pop(peer, None)

    def forget_unknown(self) -> None:
        """Forget the awaited messages of peers that are no longer known."""
        self._pending = {peer: event for peer, event in self._pending.items() if peer in self._known}

    def await_message(self, peer: PeerId) -> None:
        """Require a message that arrives from now on."""
        self._pending[peer] = asyncio.Event()

    def await_hello(self, peer: PeerId) -> None:
        """Require a message of a peer that has not sent `Hello`, which shows that it is alive and in this
        run."""
        if peer not in self.greeted:
            self._pending.setdefault(peer, asyncio.Event())

    def message_arrived(self, peer: PeerId) -> None:
        """Note a message of this peer."""
        event = self._pending.pop(peer, None)
        if event is not None:
            event.set()

    async def speaks(self, peer: PeerId, seconds: float) -> bool:
        """Wait for the peer's message if one is required. Returns False if none comes in `seconds`."""
        event = self._pending.get(peer)
        if event is None:
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
        return event.is_set()
