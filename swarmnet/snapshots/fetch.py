"""Fetching a snapshot: which chunk to ask of whom, whom to stop asking, and which root to believe.

Chunks are named by their hash, so it does not matter who sends them. A holder that sends a wrong chunk is
dropped at once, one that sends nothing for STALL_SECONDS too; their chunks go to the others.

No IO: the methods return what the caller must do. Times in seconds on the caller's clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from swarmnet.identifiers import PeerId
from swarmnet.snapshots.digest_votes import Root

SMALLEST_CHUNK_BYTES = 128 * 1024
"""0.4 s of what 1 % loss leaves a connection at 50 ms: so long the last one may be behind the others."""
MOST_CHUNKS = 900
"""The hashes of two snapshots (34 bytes each) must fit in one message header of 64 KiB."""
ASKED_AT_ONCE = 4
"""Chunks under way per holder: 512 KiB covers 10 Mbit/s at 400 ms."""
STALL_SECONDS = 2.5
"""A holder without progress for so long is dropped: three seconds are allowed from its last sign."""
AGREEMENT = 2 / 3
"""The share of the asked peers that must name a snapshot (docs/design.md, state)."""
WORTH_RESUMING = 1 / 2
"""The share of a state that must be here already for it to be fetched in the place of a newer one. Less does
not pay: the sets that follow it are forgotten `snapshot_rounds` sooner, and then all is fetched anew."""


def chunk_bytes(size: int) -> int:
    """Bytes per chunk of a state of `size` bytes: a power of two, the same for everybody."""
    chunk = SMALLEST_CHUNK_BYTES
    while chunk * MOST_CHUNKS < size:
        chunk *= 2
    return chunk


def choose_root(
    offers: Mapping[PeerId, Collection[Root]],
    signed: Mapping[PeerId, Collection[Root]] | None = None,
    resumed: Collection[Root] = (),
) -> Root | None:
    """The newest root that somebody offers and enough of the peers name; None: no agreement. `signed`: what
    peers have put their names to before, though they may hold it no more; who offers nothing has no voice.
    `resumed`: those whose download is worth going on with come first."""
    named = _named(offers, signed or {})
    agreed = [root for root, peers in named.items() if len(peers) >= AGREEMENT * len(offers)]
    return max(agreed, key=lambda root: (root in resumed, root), default=None)


def worth_resuming(here_bytes: int, size: int) -> bool:
    """Whether to go on with a state of `size` bytes, so many of them here, though a newer one is offered."""
    return here_bytes >= WORTH_RESUMING * size


def choose_restart(
    disks: Mapping[PeerId, Collection[Root]], signed: Mapping[PeerId, Collection[Root]] | None = None
) -> Root | None:
    """Where a group goes on of which nobody trains: the newest root that two thirds of the disks' owners
    name, else the one that most of them name, the newest of these: what one peer settled alone comes after
    what several agreed on. None: all disks are empty.

    Every peer gets the same answer from the same disks."""
    named = _named(disks, signed or {})
    most = max(named, key=lambda root: (len(named[root]), root), default=None)
    return choose_root(disks, signed) or most


def _named(
    offers: Mapping[PeerId, Collection[Root]], signed: Mapping[PeerId, Collection[Root]]
) -> dict[Root, set[PeerId]]:
    """Of every root that is offered, who of those who offer any names it."""
    return {
        root: {peer for peer in offers if root in offers[peer] or root in signed.get(peer, ())}
        for roots in offers.values() for root in roots
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ask:
    peer: PeerId
    index: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """This holder is asked nothing more."""

    peer: PeerId
    code: str
    """Of peers/telemetry/reasons.py."""
    reason: str = ""
    """More of it, for people."""


@dataclass(slots=True)
class _Holder:
    asked: dict[int, float] = field(default_factory=dict)
    active_at: float = 0.0


class SnapshotFetch:
    """One snapshot on its way. `missing` is empty when all is here; `stuck` when no holder is left."""

    def __init__(
        self,
        hashes: Sequence[bytes],
        holders: Sequence[PeerId],
        asked_at_once: int = ASKED_AT_ONCE,
        here: Collection[int] = (),
    ) -> None:
        """`here`: the chunks that need not be asked for."""
        self.asked_at_once = asked_at_once
        self.hashes = tuple(hashes)
        self.missing = set(range(len(hashes))).difference(here)
        self.holders = {peer: _Holder() for peer in holders}
        self.dropped: set[PeerId] = set()

    @property
    def stuck(self) -> bool:
        return bool(self.missing) and not self.holders

    def start(self, now: float) -> list[Ask | Dropped]:
        for holder in self.holders.values():
            holder.active_at = now
        return self._ask(now)

    def add(self, peer: PeerId, now: float) -> list[Ask | Dropped]:
        """One more holder, unless it was dropped."""
        if peer in self.holders or peer in self.dropped:
            return []
        self.holders[peer] = _Holder(active_at=now)
        return self._ask(now)

    def chunk(self, peer: PeerId, index: int, digest: bytes, now: float) -> tuple[bool, list[Ask | Dropped]]:
        """A chunk came, with the SHA-256 of its bytes: whether it is wanted, and what to do."""
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
        """A part of a chunk came."""
        if peer in self.holders:
            self.holders[peer].active_at = now

    def drop(self, peer: PeerId, code: str, now: float, reason: str = "") -> list[Ask | Dropped]:
        """The holder lied, left or does not have it."""
        if self.holders.pop(peer, None) is None:
            return []
        self.dropped.add(peer)
        return [Dropped(peer, code, reason), *self._ask(now)]

    def tick(self, now: float) -> list[Ask | Dropped]:
        """Drop who stalls, then ask the others."""
        stalled = [peer for peer, holder in self.holders.items()
                   if holder.asked and now >= holder.active_at + STALL_SECONDS]  # fmt: skip
        for peer in stalled:
            del self.holders[peer]
        self.dropped.update(stalled)
        dropped = [Dropped(peer, "stalled", f"sent nothing for {STALL_SECONDS:g} s") for peer in stalled]
        return [*dropped, *(self._ask(now) if stalled else ())]

    def next_deadline(self) -> float:
        return min(
            (holder.active_at + STALL_SECONDS for holder in self.holders.values() if holder.asked),
            default=float("inf"),
        )

    def _ask(self, now: float) -> list[Ask | Dropped]:
        """Fill every holder's slots. When nothing fresh is left, a holder that has done all of its own is
        asked for what one other still owes, what was asked last first: lines in use stay with their own."""
        effects: list[Ask | Dropped] = []
        asked_at = {index: at for holder in self.holders.values() for index, at in holder.asked.items()}
        owed_by = Counter(index for holder in self.holders.values() for index in holder.asked)
        fresh = sorted(self.missing - asked_at.keys(), reverse=True)
        for peer, holder in self.holders.items():
            idle = not holder.asked
            indices = [fresh.pop() for _ in range(min(self.asked_at_once - len(holder.asked), len(fresh)))]
            if idle and not indices:
                late = [index for index in self.missing if owed_by[index] == 1]
                late.sort(key=lambda index: (-asked_at[index], -index))
                indices = late[: self.asked_at_once]
            if idle and indices:
                holder.active_at = now
            for index in indices:
                owed_by[index] += 1
                holder.asked[index] = asked_at[index] = now
                effects.append(Ask(peer, index))
        return effects
