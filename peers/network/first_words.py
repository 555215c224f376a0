"""Peers that must say a word before they count as linked: those dropped for their silence, and strangers.

On a connection that stands libp2p opens streams to a process that is stopped, or beyond a partition, at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from contextlib import suppress

from swarmnet.identifiers import PeerId


class Unheard(dict[PeerId, asyncio.Event]):
    """Each with what is set when its word comes; whoever has spoken is taken out."""

    def keep(self, peers: Container[PeerId]) -> None:
        """Forget all others."""
        for peer in [peer for peer in self if peer not in peers]:
            del self[peer]

    async def speaks(self, peer: PeerId, seconds: float) -> bool:
        """Whether it says something within so long, if it must."""
        word = self.get(peer)
        if word is None:
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await word.wait()
        return word.is_set()
