"""Peers that must say a word before they count as linked: those dropped for their silence, and strangers.

On a connection that stands libp2p opens streams to a process that is stopped, or beyond a partition, at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Container
from contextlib import suppress

from swarmnet.identifiers import PeerId


class Unheard:
    def __init__(self) -> None:
        self._words: dict[PeerId, asyncio.Event] = {}

    def fell_silent(self, peer: PeerId) -> None:
        """Nothing that was heard of it before counts."""
        self._words[peer] = asyncio.Event()

    def await_word(self, peer: PeerId) -> None:
        self._words.setdefault(peer, asyncio.Event())

    def heard(self, peer: PeerId) -> None:
        word = self._words.pop(peer, None)
        if word is not None:
            word.set()

    def forget(self, peer: PeerId) -> None:
        self._words.pop(peer, None)

    def keep(self, peers: Container[PeerId]) -> None:
        """Forget all others."""
        for peer in [peer for peer in self._words if peer not in peers]:
            del self._words[peer]

    async def speaks(self, peer: PeerId, seconds: float) -> bool:
        """Whether it says something within so long, if it must."""
        word = self._words.get(peer)
        if word is None:
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await word.wait()
        return word.is_set()
