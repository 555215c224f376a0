"""What one sender may cost a peer: signature checks, bytes of unfinished messages, and how slowly they come.

No IO. Times in seconds on the caller's clock, sizes in bytes.
"""

from __future__ import annotations

from swarmnet.identifiers import PeerId

CHECKS_PER_SECOND = 50.0
"""Signatures of one peer that are checked, on the average. An honest neighbour of a group of n gives at most
a round's n contributions, and its fair share is n / 10 (membership/overlay.py, 2 x RINGS links): 100 peers
with a round every 2 s come to 5 a second, to 50 if one neighbour gave all. A check takes 0.1 to 0.2 ms
(measured): one key costs at most a hundredth of the event loop."""
CHECKS_AT_ONCE = 1024
"""... and at once, after a pause: a newcomer's first words from one neighbour are 256 statements, 32 records,
2 in the greeting and an order; a stage of 100 peers that it catches up with by all the rounds that are
kept (40, rounds/contribution_sets.py) gives it 400 contributions by that neighbour, 700 in all. 0.1 to 0.2 s
of the event loop, a message's worth at a time."""
MOST_BUCKETS = 1024
"""Peers whose spending is remembered before those that have paid all back are forgotten."""

PACE_BYTES = 64 * 1024
"""A piece as it is written (protocols/framing/frames.py): so many bytes of bodies ..."""
PACE_SECONDS = 30.0
"""... must come within so long over a stream on which a message is unfinished. A home line of 1 Mbit/s
carries 57 such pieces meanwhile: so many unfinished messages may share it, in turns, or 3.7 MB that are more
urgent may go before them all. What is later than that nobody waits for any more: an activation's deadline is
over, a contribution has been asked of another, a holder of chunks is dropped after 2.5 s."""

SMALLEST_SHARE_BYTES = 4 * 1024 * 1024
SMALLEST_WHOLE_BYTES = 32 * 1024 * 1024
"""Of unfinished messages, of one peer and of all: with small models more than anybody needs, and nothing to a
machine that trains."""
BODIES_OF_ONE = 4
"""Times the longest body of the run. An honest peer has, unfinished at a time, an activation and a gradient
on each of its link and two subflows, a contribution and a chunk; the longest body, a visitor's exact hidden
states, is twice an activation: 4 of them are 8 activations whole."""
BODIES_OF_ALL = 16
"""Times the longest body: 64 activations half arrived, twice the peers of a stage next to it that a peer
links to (membership.MOST_ADJACENT)."""


class Checks:
    """A bucket of signature checks for each peer. A message is taken while there is something in it, and may
    overdraw it; then nothing is read of that peer until the bucket holds something again."""

    def __init__(self, per_second: float = CHECKS_PER_SECOND, at_once: float = CHECKS_AT_ONCE) -> None:
        self._per_second, self._at_once = per_second, at_once
        self._buckets: dict[PeerId, tuple[float, float]] = {}
        """What was in it, and when."""

    def spend(self, peer: PeerId, count: int, now: float) -> None:
        """So many signatures were checked for this peer."""
        if count:
            level = self._level(peer, now)
            if len(self._buckets) >= MOST_BUCKETS:
                self._forget(now)
            self._buckets[peer] = (level - count, now)

    def wait(self, peer: PeerId, now: float) -> float:
        """Seconds until something may be read of this peer; 0: at once."""
        level = self._level(peer, now)
        return 0.0 if level > 0 else (1.0 - level) / self._per_second  # One more than is missing, as rounded.

    def _level(self, peer: PeerId, now: float) -> float:
        level, at = self._buckets.get(peer, (self._at_once, now))
        return min(self._at_once, level + (now - at) * self._per_second)

    def _forget(self, now: float) -> None:
        """Those with full buckets are as if they had never come."""
        for peer in [peer for peer in self._buckets if self._level(peer, now) >= self._at_once]:
            del self._buckets[peer]


class Unfinished:
    """Bytes of messages that have begun and are not whole yet, by peer and stream.

    Whoever passes a bound is cut, nobody is made to wait: a message that waits for room which only other
    unfinished messages can free would never end. Honest peers do not come near the bounds; and when all are
    too much together, those who hold most have to go, not those who came last."""

    def __init__(self) -> None:
        self._held: dict[PeerId, dict[int, int]] = {}
        self.total = 0

    def hold(self, peer: PeerId, stream: int, held: int, longest: int) -> list[int]:
        """A stream holds so many bytes now, where a body has at most `longest`. The streams to be cut."""
        streams = self._held.setdefault(peer, {})
        self.total += held - streams.get(stream, 0)
        if held:
            streams[stream] = held
        else:
            streams.pop(stream, None)
            if not streams:
                del self._held[peer]
        if held and self.of(peer) > max(SMALLEST_SHARE_BYTES, BODIES_OF_ONE * longest):
            return [stream]
        if self.total > max(SMALLEST_WHOLE_BYTES, BODIES_OF_ALL * longest):
            return list(self._held[max(self._held, key=self.of)])
        return []

    def of(self, peer: PeerId) -> int:
        """What a peer holds, over all its streams."""
        return sum(self._held.get(peer, {}).values())


class Pace:
    """Whether a stream brings what it has begun. Only bytes of bodies count, of any message: a less urgent
    one rightly waits while others pass it on the same stream; keep-alives and short words are no progress."""

    def __init__(self) -> None:
        self.until = float("inf")
        """When the stream is too slow."""
        self._came = 0

    def came(self, body_bytes: int, unfinished: bool, now: float) -> None:
        """So many bytes of bodies have come; whether something is unfinished after them."""
        self._came += body_bytes
        if not unfinished:
            self.until = float("inf")
        elif self.until == float("inf") or self._came >= PACE_BYTES:
            self.until, self._came = now + PACE_SECONDS, 0

    def paused(self, now: float) -> None:
        """Nothing was read meanwhile, by us."""
        if self.until != float("inf"):
            self.until, self._came = now + PACE_SECONDS, 0
