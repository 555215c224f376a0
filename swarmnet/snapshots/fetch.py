"""Downloads a snapshot from several holders: which chunk to ask of which peer, when to drop one, and which
root to trust.

A *root* names a snapshot: its round, and the digest of the settled weights after it. A *holder* is a peer
that has the snapshot. Chunks are named by their hash, so it does not matter which holder sends them. A holder
that sends a wrong chunk, or nothing for `STALL_SECONDS`, is dropped, and the others are asked for its chunks.

No IO: the methods return what the caller must do. All times are in seconds on the caller's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from swarmnet.identifiers import PeerId
from swarmnet.snapshots.digest_votes import Root

SMALLEST_CHUNK_BYTES = 128 * 1024
"""Smallest chunk: 0.4 s at the rate that 1 % loss leaves a connection at 50 ms. The last may lag by it."""
MAX_CHUNKS = 900
"""Most chunks of a snapshot: the hashes of two (34 bytes each) must fit in one message header of 64 KiB."""
ASKED_AT_ONCE = 4
"""Chunks requested at a time from each holder: 512 KiB covers 10 Mbit/s at 400 ms."""
STALL_SECONDS = 2.5
"""A holder without progress for this long is dropped. Three seconds are allowed from its last sign."""
AGREEMENT = 2 / 3
"""Fraction of the asked peers that must name a snapshot (docs/design.md, state)."""
WORTH_RESUMING = 1 / 2
"""Fraction of a state that must be here for it to be preferred to a newer one. With less it does not pay: the
sets that follow it are forgotten `snapshot_interval` sooner, and then the whole state is fetched again."""


def chunk_bytes(size: int) -> int:
    """Return the bytes per chunk of a state of `size` bytes: a power of two that all peers compute alike."""
    chunk = SMALLEST_CHUNK_BYTES
    while chunk * MAX_CHUNKS < size:
        chunk *= 2
    return chunk


def choose_root(
    offers: Mapping[PeerId, Collection[Root]],
    signed: Mapping[PeerId, Collection[Root]] | None = None,
    resumed: Collection[Root] = (),
) -> Root | None:
    """Return the newest offered root for which enough peers vouch: at least the fraction `AGREEMENT` of the
    peers in `offers`. Returns None if there is no such root.

    A peer vouches for the roots that it offers, and for those that it has signed (`signed`), even if it no
    longer holds them. `resumed` are roots whose partial download is worth resuming: one of them is preferred
    to a newer root."""
    named = _peers_by_root(offers, signed or {})
    agreed = [root for root, peers in named.items() if len(peers) >= AGREEMENT * len(offers)]
    return max(agreed, key=lambda root: (root in resumed, root), default=None)


def worth_resuming(here_bytes: int, size: int) -> bool:
    """Return whether to resume the download of an older state of `size` bytes, of which `here_bytes` have
    arrived already."""
    return here_bytes >= WORTH_RESUMING * size


def choose_restart(
    disks: Mapping[PeerId, Collection[Root]], signed: Mapping[PeerId, Collection[Root]] | None = None
) -> Root | None:
    """Return the root from which a group restarts if none of its peers trains; None if all disks are empty.
    `disks`: the roots on each peer's disk.

    It is the newest root that two thirds of the peers name (`choose_root`), or else the newest of those that
    most of them name. Roots that several peers agreed on thus come before those that one settled alone. Every
    peer gets the same result from the same disks."""
    named = _peers_by_root(disks, signed or {})
    named_most = max(named, key=lambda root: (len(named[root]), root), default=None)
    return choose_root(disks, signed) or named_most


def _peers_by_root(
    offers: Mapping[PeerId, Collection[Root]], signed: Mapping[PeerId, Collection[Root]]
) -> dict[Root, set[PeerId]]:
    """Return offered root -> the peers in `offers` that offer or have signed it."""
    offered = [root for roots in offers.values() for root in roots]
    return {
        root: {peer for peer in offers if root in offers[peer] or root in signed.get(peer, ())}
        for root in offered
    }


@dataclass(frozen=True, slots=True)
class RequestChunk:
    """Request a chunk from a holder."""

    peer: PeerId
    index: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """Report that a holder was dropped and gets no more requests."""

    peer: PeerId
    code: str
    """The reason (peers/telemetry/reasons.py)."""
    reason: str = ""
    """Details of the reason, for users."""


@dataclass(slots=True)
class _Holder:
    """The chunks that a holder owes, with the time of each request. `active_at`: when it last sent something,
    or got a request while it owed nothing."""

    asked: dict[int, float] = field(default_factory=dict)
    active_at: float = 0.0


class SnapshotFetch:
    """The download of one snapshot. `missing`: chunks that are not here; `stuck`: no holder is left."""

    def __init__(
        self,
        *,
        hashes: Sequence[bytes],
        holders: Sequence[PeerId],
        asked_at_once: int = ASKED_AT_ONCE,
        here: Collection[int] = (),
    ) -> None:
        """`hashes`: the SHA-256 of each chunk; `asked_at_once`: how many chunks each holder owes at a time;
        `here`: indices of chunks that need not be requested."""
        self.asked_at_once = asked_at_once
        self.hashes = tuple(hashes)
        self.missing = set(range(len(hashes))).difference(here)
        self.holders = {peer: _Holder() for peer in holders}
        self.dropped: set[PeerId] = set()

    @property
    def stuck(self) -> bool:
        """True if chunks are missing and no holder is left."""
        return bool(self.missing) and not self.holders

    def start(self, now: float) -> list[RequestChunk | Dropped]:
        """Begin. Returns the first requests."""
        for holder in self.holders.values():
            holder.active_at = now
        return self._ask(now)

    def add(self, peer: PeerId, now: float) -> list[RequestChunk | Dropped]:
        """Add a holder unless it was dropped. Returns the next requests."""
        if peer in self.holders or peer in self.dropped:
            return []
        self.holders[peer] = _Holder(active_at=now)
        return self._ask(now)

    def chunk(
        self, peer: PeerId, index: int, digest: bytes, now: float
    ) -> tuple[bool, list[RequestChunk | Dropped]]:
        """Record that chunk `index` came; `digest` is the SHA-256 of its bytes. Returns whether it was
        missing, and what to do next. If the hash is wrong, the holder is dropped."""
        holder = self.holders.get(peer)
        if holder is not None:
            holder.asked.pop(index, None)
            holder.active_at = now
        if not 0 <= index < len(self.hashes) or digest != self.hashes[index]:
            return False, self.drop(peer, "wrong_hash", now, f"sent chunk {index} with a wrong hash")
        wanted = index in self.missing
        self.missing.discard(index)
        return wanted, self._ask(now)

    def progressed(self, peer: PeerId, now: float) -> None:
        """Record that a part of a chunk came."""
        if peer in self.holders:
            self.holders[peer].active_at = now

    def drop(self, peer: PeerId, code: str, now: float, reason: str = "") -> list[RequestChunk | Dropped]:
        """Drop a holder that sent a wrong chunk, left, or lacks the snapshot. Returns what to do next."""
        if self.holders.pop(peer, None) is None:
            return []
        self.dropped.add(peer)
        return [Dropped(peer, code, reason), *self._ask(now)]

    def tick(self, now: float) -> list[RequestChunk | Dropped]:
        """Drop the holders that owe chunks and have sent nothing for `STALL_SECONDS`. Returns what to do."""
        owing = [(peer, holder) for peer, holder in self.holders.items() if holder.asked]
        stalled = [peer for peer, holder in owing if now >= holder.active_at + STALL_SECONDS]
        if not stalled:
            return []
        for peer in stalled:
            del self.holders[peer]
        self.dropped.update(stalled)
        reports = [Dropped(peer, "stalled", f"sent nothing for {STALL_SECONDS:g} s") for peer in stalled]
        return [*reports, *self._ask(now)]

    def next_deadline(self) -> float:
        """Return when the first holder will have stalled; infinite if none owes a chunk."""
        owing = [holder for holder in self.holders.values() if holder.asked]
        return min((holder.active_at + STALL_SECONDS for holder in owing), default=float("inf"))

    def _ask(self, now: float) -> list[RequestChunk | Dropped]:
        """Return new requests, until each holder owes `asked_at_once` chunks.

        When no unrequested chunk is left, a holder that owes none is asked for chunks that one other holder
        still owes. The last requested ones come first, as the other holder sends them last."""
        effects: list[RequestChunk | Dropped] = []
        asked_at = {index: at for holder in self.holders.values() for index, at in holder.asked.items()}
        # Chunk -> the number of holders that owe it.
        owed_by = Counter(index for holder in self.holders.values() for index in holder.asked)
        unrequested = sorted(self.missing - asked_at.keys(), reverse=True)
        for peer, holder in self.holders.items():
            is_idle = not holder.asked
            count = min(self.asked_at_once - len(holder.asked), len(unrequested))
            indices = [unrequested.pop() for _ in range(count)]
            if is_idle and not indices:
                owed_once = [index for index in self.missing if owed_by[index] == 1]
                owed_once.sort(key=lambda index: (-asked_at[index], -index))
                indices = owed_once[: self.asked_at_once]
            if is_idle and indices:
                holder.active_at = now  # It can stall from now on.
            for index in indices:
                owed_by[index] += 1
                holder.asked[index] = asked_at[index] = now
                effects.append(RequestChunk(peer, index))
        return effects
