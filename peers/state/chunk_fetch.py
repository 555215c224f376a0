"""Fetch the chunks of one snapshot from the peers that offer it (holders).

Carriers are extra connections for chunks.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from peers.runtime.lived_clock import Clock
from peers.runtime.timer import Timer
from peers.state.partial_download import Download
from peers.telemetry import log_events
from peers.telemetry.log_events import Notify
from peers.telemetry.reasons import HOLDERS
from protocols.fields import Body
from protocols.messages.table import GetChunk, Lane, Message, SnapshotRoot
from protocols.ports import ChunkDownloader, Transport
from swarmnet.identifiers import PeerId
from swarmnet.membership.membership import PeerInfo
from swarmnet.snapshots.fetch import ASKED_AT_ONCE, Dropped, RequestChunk, SnapshotFetch, chunk_bytes

MORE_HOLDERS_SECONDS = 2.0
"""Interval for asking more peers during a fetch: 103 MB take 25 s from four holders on home links."""


class SnapshotPorts(Protocol):
    """The part of the neighbourhood that the state path needs."""

    @property
    def clock(self) -> Clock: ...

    @property
    def transport(self) -> Transport: ...

    def known(self) -> Mapping[PeerId, PeerInfo]:
        """Return the known peers."""

    def post(self, peer: PeerId, lane: Lane, message: Message, body: Body = b"") -> bool: ...

    def answer(self, peer: PeerId, lane: Lane, message: Message, body: Body = b"") -> None:
        """Send a response to a neighbour or a visitor."""

    def refused(self, peer: PeerId, code: str, reason: str) -> None: ...


@dataclass(slots=True)
class FetchCounts:
    """Counts of the chunks that a peer fetched."""

    fetched_bytes: int = 0
    """Bytes of the newest state, including those fetched before a restart of this peer."""
    kept_bytes: int = 0
    """The part of them that was fetched before the restart."""
    chunks_refused: int = 0
    """Number of chunks with a wrong hash."""


class ChunkFetch:
    """One snapshot that is being fetched. Driver of `SnapshotFetch`."""

    def __init__(
        self,
        *,
        root: SnapshotRoot,
        holders: Sequence[PeerId],
        download: Download,
        here: Collection[int],
        carriers: ChunkDownloader | None,
        neighbourhood: SnapshotPorts,
        counts: FetchCounts,
        log_event: log_events.LogEvent,
        notify: Notify,
    ) -> None:
        """`here` has the chunks that were fetched before a restart. Without `carriers`, chunks come over the
        links."""
        self.root = root
        self.download = download
        self._neighbourhood = neighbourhood
        self._carriers = carriers
        self._counts = counts
        self._log_event = log_event
        self._notify = notify
        at_once = carriers.requests_per_holder if carriers is not None else ASKED_AT_ONCE
        self._fetch = SnapshotFetch(
            hashes=tuple(root.chunks), holders=holders, asked_at_once=at_once, here=here
        )
        self._ended = asyncio.Event()
        self._timer = Timer(self._drop_stalled, neighbourhood.clock)

    async def run(self, ask_others: Callable[[], None]) -> bool:
        """Fetch all chunks. Returns False if no holder is left. `ask_others()` is called now and then to find
        more holders."""
        try:
            self._apply_effects(self._fetch.start(self._now()))
            while not self._ended.is_set():  # Ends when complete, or without holders.
                with suppress(TimeoutError):
                    async with asyncio.timeout(MORE_HOLDERS_SECONDS):
                        await self._ended.wait()
                ask_others()
        finally:
            self.close()
        return not self._fetch.stuck

    def close(self) -> None:
        self._timer.close()

    def is_new(self, peer: PeerId) -> bool:
        """Return whether a peer neither is a holder nor was dropped as one."""
        return peer not in self._fetch.holders and peer not in self._fetch.dropped

    def add(self, peer: PeerId, offered: SnapshotRoot) -> None:
        """Add a holder if it offers this snapshot, with the same chunks."""
        if offered.digest == self.root.digest and tuple(offered.chunks) == self._fetch.hashes:
            self._apply_effects(self._fetch.add(peer, self._now()))

    def drop(self, peer: PeerId, code: str, reason: str = "") -> None:
        """Ask a holder no more."""
        self._apply_effects(self._fetch.drop(peer, code, self._now(), reason))

    def no_chunk(self, peer: PeerId, digest: bytes, index: int) -> None:
        """Drop a holder that no longer has a chunk."""
        if digest == self.root.digest:
            self.drop(peer, "no_chunk", f"no longer has chunk {index}")

    def carrier_failed(self, peer: PeerId, digest: bytes, index: int) -> None:
        """Request a chunk over the link, because the carrier's connection failed."""
        if digest == self.root.digest:
            self._neighbourhood.post(peer, "group", GetChunk(digest, index))

    def progressed(self, peer: PeerId) -> None:
        """Called when a part of a chunk arrived from a holder."""
        self._fetch.progressed(peer, self._now())

    def received(self, peer: PeerId, digest: bytes, index: int, body: bytes) -> None:
        """Check a received chunk, store it, and continue the fetch. Its peer is dropped if the length or the
        hash is wrong; `SnapshotFetch.chunk` checks the hash. Chunks of other snapshots are ignored."""
        root = self.root
        if digest != root.digest:
            return
        received = hashlib.sha256(body).digest()
        if not 0 <= index < len(root.chunks) or received != root.chunks[index]:
            self._counts.chunks_refused += 1
        size = chunk_bytes(root.size)
        if len(body) != min(size, root.size - index * size):
            reason = f"chunk {index} has {len(body)} bytes"
            self._neighbourhood.refused(peer, "malformed", reason)
            self.drop(peer, "wrong_length", reason)
            return
        is_wanted, effects = self._fetch.chunk(peer, index, received, self._now())
        if is_wanted:
            self.download.put(index, body)
            self._counts.fetched_bytes += len(body)
            if self._fetch.missing:  # A complete download needs no copy on disk.
                self.download.keep(index)
        self._apply_effects(effects)

    def _now(self) -> float:
        return self._neighbourhood.clock.time()

    def _drop_stalled(self) -> None:
        """Drop holders that stall. Called by the timer."""
        self._apply_effects(self._fetch.tick(self._now()))

    def _apply_effects(self, effects: Sequence[RequestChunk | Dropped]) -> None:
        """Carry out what `SnapshotFetch` has decided: send its requests, and report the holders that it has
        dropped. End `run` if the fetch has ended, and set the timer for the next stall."""
        for effect in effects:
            match effect:
                case RequestChunk(peer, index):
                    known = self._neighbourhood.known().get(peer)
                    if self._carriers is not None and known is not None:
                        self._carriers.ask(peer, known.addresses, self.root.digest, index)
                    else:
                        self._neighbourhood.post(peer, "group", GetChunk(self.root.digest, index))
                case Dropped(peer, code, reason):
                    reason = reason or HOLDERS[code].meaning
                    self._log_event(log_events.HolderDropped(peer=peer, code=code, reason=reason))
                    left = len(self._fetch.holders)
                    self._notify("holder", f"{peer} {reason}; it is asked no more, other holders: {left}")
        if not self._fetch.missing or self._fetch.stuck:
            self._ended.set()
        self._timer.arm(self._fetch.next_deadline())
