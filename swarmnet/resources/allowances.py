"""What one sender may cost a peer: signature checks, bytes of answers, unfinished messages, and how slowly
they come.

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
"""Names whose spending is remembered, as many as a directory of some hundred peers has askers; about 200
bytes each. Beyond that the quarter that has spent least is forgotten, those that have paid all back first."""

ANSWER_BYTES_PER_SECOND = 256_000.0
"""Bytes of answers that the directory gives one asker, and one address range, on the average. An honest
worker looks up its stage and the two next to it every 20 s: with 400 peers in each of them and records of
627 bytes (tests/protocols/dht/test_answers.py) that is 830 kB, 42 kB a second, from one of several nodes."""
ANSWER_BYTES_AT_ONCE = 4_000_000.0
"""... and at once: a newcomer's look-ups of all stages of a swarm of 400 peers are 278 kB, and the longest
answer that exists (`ANSWER_LIMIT` of protocols/dht/answers.py) is 3.5 MB."""

PACE_BYTES = 64 * 1024
"""A piece as it is written (protocols/framing/frames.py): so many bytes of bodies ..."""
PACE_SECONDS = 30.0
"""... must come within so long over a stream on which a message is unfinished. A home line of 1 Mbit/s
carries 57 such pieces meanwhile: so many unfinished messages may share it, in turns, or 3.7 MB that are more
urgent may go before them all. What is later than that nobody waits for any more: an activation's deadline is
over, a contribution has been asked of another, a holder of chunks is dropped after 2.5 s."""

_PEER = "peer "
"""Before the names of peers: no address range begins so."""

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


class Buckets:
    """A token bucket for each name (a peer id, an address range). A name may spend while its bucket holds
    something, and may overdraw it; then it waits until the bucket holds something again."""

    def __init__(self, per_second: float, at_once: float) -> None:
        self._per_second = per_second
        self._at_once = at_once
        self._buckets: dict[str, tuple[float, float]] = {}
        """What was in it, and when."""

    def spend(self, name: str, amount: float, now: float) -> None:
        """Take so much out of the bucket of this name."""
        if not amount:
            return
        level = self.level(name, now)
        if name not in self._buckets and len(self._buckets) >= MOST_BUCKETS:
            self._forget(now)
        self._buckets[name] = (level - amount, now)

    def wait(self, name: str, now: float) -> float:
        """Seconds until this name may spend; 0: at once."""
        level = self.level(name, now)
        return 0.0 if level > 0 else (1.0 - level) / self._per_second  # One more than is missing, as rounded.

    def level(self, name: str, now: float) -> float:
        """What the bucket of this name holds; below 0 after it was overdrawn."""
        level, at = self._buckets.get(name, (self._at_once, now))
        return min(self._at_once, level + (now - at) * self._per_second)

    def _forget(self, now: float) -> None:
        """Make room: the fullest quarter goes, so who has overdrawn most is remembered longest."""
        fullest = sorted(self._buckets, key=lambda name: self.level(name, now), reverse=True)
        for name in fullest[: MOST_BUCKETS // 4]:
            del self._buckets[name]


class Checks(Buckets):
    """A bucket of signature checks for each peer. A message is taken while there is something in it, and may
    overdraw it; then nothing is read of that peer until the bucket holds something again."""

    def __init__(self, per_second: float = CHECKS_PER_SECOND, at_once: float = CHECKS_AT_ONCE) -> None:
        super().__init__(per_second, at_once)


class AnswerBudget:
    """How many bytes an asker may still be answered: by its own bucket, and by that of its address range, for
    keys are free and networks are not."""

    def __init__(
        self, per_second: float = ANSWER_BYTES_PER_SECOND, at_once: float = ANSWER_BYTES_AT_ONCE
    ) -> None:
        self._buckets = Buckets(per_second, at_once)

    def left(self, peer: PeerId, address_range: str, now: float) -> int:
        """Bytes that may go to this peer at once; 0: none. `address_range`: empty where it is not known."""
        names = (f"{_PEER}{peer}", address_range)
        return max(0, int(min(self._buckets.level(name, now) for name in names)))

    def spend(self, peer: PeerId, address_range: str, size: int, now: float) -> None:
        """So many bytes go to this peer."""
        for name in (f"{_PEER}{peer}", address_range):
            self._buckets.spend(name, size, now)


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
