"""Carry out the download of one object in chunks: send the requests that `SnapshotFetch` decides, check what
arrives, and drop the holders that fail. The object is a snapshot of the weights or a file of text."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from peers.runtime.timer import HasTime, Timer
from swarmnet.identifiers import PeerId
from swarmnet.snapshots.fetch import Dropped, RequestChunk, SnapshotFetch, chunk_bytes


@dataclass(eq=False, kw_only=True)
class ChunkTransfer:
    """One running download. `ended` is set when all chunks are here, or no holder is left. `size` is that of
    the object in bytes. `request(holder, index)` asks a holder for a chunk, `put(index, bytes)` stores a
    correct one, and `dropped` reports a holder that is asked no more."""

    fetch: SnapshotFetch
    size: int
    clock: HasTime
    request: Callable[[PeerId, int], None]
    put: Callable[[int, bytes], None]
    dropped: Callable[[Dropped], None]

    def __post_init__(self) -> None:
        self.ended = asyncio.Event()
        self._timer = Timer(lambda: self._apply(self.fetch.tick(self.clock.time())), self.clock)

    def start(self) -> None:
        self._apply(self.fetch.start(self.clock.time()))

    def add(self, peer: PeerId) -> None:
        """Add a holder, unless it was dropped before."""
        self._apply(self.fetch.add(peer, self.clock.time()))

    def drop(self, peer: PeerId, code: str, reason: str = "") -> None:
        """Ask a holder no more; `code` is one of reasons.HOLDERS."""
        self._apply(self.fetch.drop(peer, code, self.clock.time(), reason))

    def progressed(self, peer: PeerId) -> None:
        """Record that a part of a chunk came."""
        self.fetch.progressed(peer, self.clock.time())

    def receive(self, peer: PeerId, index: int, body: bytes) -> bool:
        """Store a chunk and continue. Returns False, and drops its sender, if its hash or length is wrong."""
        hashes, digest, size = self.fetch.hashes, hashlib.sha256(body).digest(), chunk_bytes(self.size)
        is_right = 0 <= index < len(hashes) and digest == hashes[index]
        if len(body) != min(size, self.size - index * size):
            self.drop(peer, "wrong_length", f"chunk {index} has {len(body)} bytes")
            return is_right
        is_wanted, effects = self.fetch.chunk(peer, index, digest, self.clock.time())
        if is_wanted:
            self.put(index, body)
        self._apply(effects)
        return is_right

    def close(self) -> None:
        self._timer.close()

    def _apply(self, effects: Sequence[RequestChunk | Dropped]) -> None:
        """Carry out what `SnapshotFetch` has decided, and set the timer for the next stall."""
        for effect in effects:
            match effect:
                case RequestChunk(peer, index):
                    self.request(peer, index)
                case Dropped():
                    self.dropped(effect)
        if not self.fetch.missing or self.fetch.stuck:
            self.ended.set()
        self._timer.arm(self.fetch.next_deadline())
