"""Track peers that must send a message before they count as linked: those dropped for silence, and new ones.

On an existing connection, libp2p opens streams at once even if the process is stopped or beyond a partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from contextlib import suppress

from swarmnet.identifiers import PeerId


class PendingHandshakes(dict[PeerId, asyncio.Event]):
    """Maps each such peer to an event that is set when its message arrives. The peer is then removed."""

    def keep(self, peers: Container[PeerId]) -> None:
        """Forget all peers except these."""
        for peer in [peer for peer in self if peer not in peers]:
            del self[peer]

    async def speaks(self, peer: PeerId, seconds: float) -> bool:
        """Wait for the peer's message if one is required. Returns False if none comes in `seconds`."""
        word = self.get(peer)
        if word is None:
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await word.wait()
        return word.is_set()
