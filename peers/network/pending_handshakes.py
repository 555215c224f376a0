"""Track peers that must send a message before they count as linked: those dropped for silence, and new ones.

An opened stream proves nothing. On an existing connection, libp2p opens streams at once, even if the other
process is stopped or unreachable."""

from __future__ import annotations

import asyncio
from collections.abc import Container
from contextlib import suppress

from swarmnet.identifiers import PeerId


class PendingHandshakes(dict[PeerId, asyncio.Event]):
    """Maps each such peer to an event. At the peer's message, its entry is removed and the event set."""

    def keep(self, peers: Container[PeerId]) -> None:
        """Forget all peers except these."""
        for peer in [peer for peer in self if peer not in peers]:
            del self[peer]

    async def speaks(self, peer: PeerId, seconds: float) -> bool:
        """Wait for the peer's message if one is required. Returns False if none comes in `seconds`."""
        message_arrived = self.get(peer)
        if message_arrived is None:
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await message_arrived.wait()
        return message_arrived.is_set()
