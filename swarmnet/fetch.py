"""Fetching a snapshot: which chunk to ask of whom, whom to stop asking, and which root to believe.

Chunks are named by their hash, so it does not matter who sends them. A holder that sends a wrong chunk is
dropped at once, one that sends nothing for STALL_SECONDS too; their chunks go to the others.

No IO: the methods return what the caller must do. Times in seconds on the caller's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swarmnet.identifiers import PeerId

SMALLEST_CHUNK_BYTES = 256 * 1024
MOST_CHUNKS = 1024
"""Their hashes (32 bytes each) must fit in one message header of 64 KiB."""
ASKED_AT_ONCE = 4
"""Chunks under way per holder: 1 MiB covers 10 Mbit/s at 800 ms."""
STALL_SECONDS = 3.0
AGREEMENT = 2 / 3
"""The share of the asked peers that must name a snapshot (docs/design.md, state)."""


def chunk_bytes(size: int) -> int:
    """Bytes per chunk of a state of `size` bytes: a power of two, the same for everybody."""
    chunk = SMALLEST_CHUNK_BYTES
    while chunk * MOST_CHUNKS < size:
        chunk *= 2
    return chunk


def choose_root(offers: Mapping[PeerId, Sequence[tuple[int, bytes]]]) -> tuple[int, bytes] | None:
    """The newest (round, digest) that enough of the peers name; None: no agreement."""
    named: dict[tuple[int, bytes], int] = {}
    for roots in offers.values():
        for root in set(roots):
            named[root] = named.get(root, 0) + 1
    agreed = [root for root, count in named.items() if count >= AGREEMENT * len(offers)]
    return max(agreed, default=None)


def choose_restart(disks: Mapping[PeerId, Sequence[tuple[int, bytes]]]) -> tuple[int, bytes] | None:
    """Where a group goes on of which nobody trains: the newest (round, digest) that two thirds of the disks
    hold, else the one that most of them hold, the newest of these. None: all disks are empty.

    Every peer gets the same answer from the same disks."""
    named = Counter(root for roots in disks.values() for root in set(roots))
    return choose_root(disks) or max(named, key=lambda root: (named[root], root), default=None)


@dataclass(frozen=True, slots=True)
class Ask:
    peer: PeerId
    index: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """This holder is asked nothing more."""

    peer: PeerId
    reason: str


@dataclass(slots=True)
class _Holder:
    asked: dict[int, float] = field(default_factory=dict)
    active_at: float = 0.0


class SnapshotFetch:
    """One snapshot on its way. `missing` is empty when all is here; `stuck` when no holder is left."""

    def __init__(
        self, hashes: Sequence[bytes], holders: Sequence[PeerId], asked_at_once: int = ASKED_AT_ONCE
    ) -> None:
        self.asked_at_once = asked_at_once
        self.hashes = tuple(hashes)
        self.missing = set(range(len(hashes)))
        self.holders = {peer: _Holder() for peer in holders}

    @property
    def stuck(self) -> bool:
        return bool(self.missing) and not self.holders

    def start(self, now: float) -> list[Ask | Dropped]:
        for holder in self.holders.values():
            holder.active_at = now
        return self._ask(now)

    def chunk(self, peer: PeerId, index: int, digest: bytes, now: float) -> tuple[bool, list[Ask | Dropped]]:
        """A chunk came, with the SHA-256 of its bytes: whether it is wanted, and what to do."""
        holder = self.holders.get(peer)
        if holder is not None:
            holder.asked.pop(index, None)
            holder.active_at = now
        if not 0 <= index < len(self.hashes) or digest != self.hashes[index]:
            return False, self.drop(peer, f"sent chunk {index} with a wrong hash", now)
        wanted = index in self.missing
        self.missing.discard(index)
        return wanted, self._ask(now)

    def progressed(self, peer: PeerId, now: float) -> None:
        """A part of a chunk came."""
        if peer in self.holders:
            self.holders[peer].active_at = now

    def drop(self, peer: PeerId, reason: str, now: float) -> list[Ask | Dropped]:
        """The holder lied, left or does not have it."""
        if self.holders.pop(peer, None) is None:
            return []
        return [Dropped(peer, reason), *self._ask(now)]

    def tick(self, now: float) -> list[Ask | Dropped]:
        """Drop who stalls, then ask the others."""
        stalled = [peer for peer, holder in self.holders.items()
                   if holder.asked and now >= holder.active_at + STALL_SECONDS]  # fmt: skip
        for peer in stalled:
            del self.holders[peer]
        dropped = [Dropped(peer, f"sent nothing for {STALL_SECONDS:g} s") for peer in stalled]
        return [*dropped, *(self._ask(now) if stalled else ())]

    def next_deadline(self) -> float:
        return min(
            (holder.active_at + STALL_SECONDS for holder in self.holders.values() if holder.asked),
            default=float("inf"),
        )

    def _ask(self, now: float) -> list[Ask | Dropped]:
        """Fill every holder's slots; near the end, chunks are asked of a second holder rather than none."""
        effects: list[Ask | Dropped] = []
        under_way = {index for holder in self.holders.values() for index in holder.asked}
        for peer, holder in self.holders.items():
            fresh = sorted(self.missing - under_way)
            second = sorted((self.missing & under_way) - holder.asked.keys()) if not fresh else []
            for index in (fresh or second)[: self.asked_at_once - len(holder.asked)]:
                if not holder.asked:
                    holder.active_at = now
                holder.asked[index] = now
                under_way.add(index)
                effects.append(Ask(peer, index))
        return effects
