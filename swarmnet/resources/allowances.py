"""Limit what one sender may cost a peer: signature checks, answer bytes, unfinished messages, and slow
streams.

The module does no IO. All times are seconds on the caller's clock, sizes are bytes.
"""

from __future__ import annotations

from swarmnet.identifiers import PeerId

CHECKS_PER_SECOND = 50.0
"""Average number of signatures of one peer that are checked. An honest neighbour in a group of n sends at
most a round's n contributions. Its fair share is n / 10 (`membership/overlay.py`, 2 x RINGS links). With 100
peers and a round every 2 s that is 5 a second, or 50 if one neighbour sent all. A check takes 0.1 to 0.2 ms
(measured), so one key costs at most a hundredth of the event loop."""
CHECKS_AT_ONCE = 1024
"""Maximum burst of checks after a pause. A newcomer first gets from one neighbour 256 statements, 32 records,
2 signatures in the greeting and an order. Catching up with a stage of 100 peers by all kept rounds (40,
`rounds/contribution_sets.py`) adds 400 contributions by that neighbour, 700 in all. This takes 0.1 to 0.2 s
of the event loop, one message at a time."""
MAX_BUCKETS = 1024
"""Maximum number of names whose spending is remembered, at about 200 bytes each. A directory of some hundred
peers has as many clients. Beyond that the quarter that has spent least is forgotten."""

ANSWER_BYTES_PER_SECOND = 256_000.0
"""Average rate of answer bytes from the directory to one client, and to one address range. An honest worker
looks up its stage and the two next to it every 20 s. With 400 peers in each and records of 627 bytes
(`tests/protocols/dht/test_answers.py`) that is 830 kB, 42 kB a second, from one of several nodes."""
ANSWER_BYTES_AT_ONCE = 4_000_000.0
"""Maximum burst of answer bytes. A newcomer's look-ups of all stages of a swarm of 400 peers are 278 kB. The
longest possible answer (`ANSWER_LIMIT` of `protocols/dht/answers.py`) is 3.5 MB."""

PACE_BYTES = 64 * 1024
"""Minimum progress of a stream with an unfinished message: this many bytes of bodies, the size of a written
piece (`protocols/framing/frames.py`), within `PACE_SECONDS`."""
PACE_SECONDS = 30.0
"""Time limit for `PACE_BYTES`. An uplink of 1 Mbit/s carries 57 such pieces in this time. This many
unfinished messages may share it in turns, or 3.7 MB of more urgent ones may go first. Slower messages are
useless anyway. By then an activation's deadline is over, a contribution is requested elsewhere, and a chunk
holder is dropped (2.5 s)."""

_PEER = "peer "
"""Prefix of the names of peers; no address range begins with it."""

SMALLEST_SHARE_BYTES = 4 * 1024 * 1024
SMALLEST_WHOLE_BYTES = 32 * 1024 * 1024
"""Bytes of unfinished messages, of one peer and of all, that are always allowed. They exceed all needs with
small models and are nothing for a machine that trains."""
BODIES_OF_ONE = 4
"""Unfinished bytes that one peer may have, in multiples of the run's longest body. An honest peer has at most
an activation and a gradient on each of its link and two subflows, a contribution and a chunk. The longest
body, a client's exact hidden states, is twice an activation, so the limit is 8 whole activations."""
BODIES_OF_ALL = 16
"""Unfinished bytes of all peers, in multiples of the longest body. It equals 64 activations that are half
received, twice the peers of an adjacent stage to which a peer has links (`membership.MAX_ADJACENT`)."""


class Buckets:
    """A token bucket for each name (a peer id or an address range). A name may spend while its bucket is
    positive, and may overdraw it. Then it waits until the bucket is positive again."""

    def __init__(self, per_second: float, at_once: float) -> None:
        self._per_second = per_second
        self._at_once = at_once
        self._buckets: dict[str, tuple[float, float]] = {}
        """Maps a name to (level, time of that level)."""

    def spend(self, name: str, amount: float, now: float) -> None:
        """Take `amount` out of the bucket of this name, whose level may become negative. A new name beyond
        `MAX_BUCKETS` makes room first: the fullest quarter of the buckets is forgotten."""
        if not amount:
            return
        level = self.level(name, now)
        if name not in self._buckets and len(self._buckets) >= MAX_BUCKETS:
            self._forget(now)
        self._buckets[name] = (level - amount, now)

    def wait(self, name: str, now: float) -> float:
        """Return the seconds until this name may spend; 0 if it may now."""
        level = self.level(name, now)
        if level > 0:
            return 0.0
        return (1.0 - level) / self._per_second  # Until the level is 1: rounding could miss 0.

    def level(self, name: str, now: float) -> float:
        """Return the level of this name's bucket; below 0 after it was overdrawn."""
        level, at = self._buckets.get(name, (self._at_once, now))
        return min(self._at_once, level + (now - at) * self._per_second)

    def _forget(self, now: float) -> None:
        """Drop the fullest quarter of the buckets. The most overdrawn names are remembered longest."""
        fullest = sorted(self._buckets, key=lambda name: self.level(name, now), reverse=True)
        for name in fullest[: MAX_BUCKETS // 4]:
            del self._buckets[name]


class Checks(Buckets):
    """Token buckets of signature checks for each peer. A message is accepted while the bucket is positive,
    and may overdraw it. Then nothing is read from that peer until the bucket is positive again."""

    def __init__(self, per_second: float = CHECKS_PER_SECOND, at_once: float = CHECKS_AT_ONCE) -> None:
        super().__init__(per_second, at_once)


class AnswerBudget:
    """Answer bytes that a client may still get, by its own bucket and by that of its address range. The range
    counts, because keys are free and networks are not."""

    def __init__(
        self, per_second: float = ANSWER_BYTES_PER_SECOND, at_once: float = ANSWER_BYTES_AT_ONCE
    ) -> None:
        self._buckets = Buckets(per_second, at_once)

    def left(self, peer: PeerId, address_range: str, now: float) -> int:
        """Return the bytes that may be sent to this peer now: the lower of the levels of its own bucket and
        its address range's, at least 0. `address_range` is empty if unknown."""
        names = (f"{_PEER}{peer}", address_range)
        lower_level = min(self._buckets.level(name, now) for name in names)
        return max(0, int(lower_level))

    def spend(self, peer: PeerId, address_range: str, size: int, now: float) -> None:
        """Record that `size` bytes are sent to this peer."""
        for name in (f"{_PEER}{peer}", address_range):
            self._buckets.spend(name, size, now)


class Unfinished:
    """Bytes of unfinished messages, by peer and stream. A stream beyond a limit is cut; none has to wait for
    memory. If unfinished messages waited for each other's memory, none of them would ever finish. Honest
    peers stay far below the limits. If all together exceed the limit, the peer with the most bytes is cut,
    not the newest."""

    def __init__(self) -> None:
        self._held: dict[PeerId, dict[int, int]] = {}
        self.total = 0

    def hold(self, peer: PeerId, stream: int, held: int, longest: int) -> list[int]:
        """Record that a stream of `peer` now holds `held` bytes of unfinished messages. Both limits are
        multiples of `longest`, the run's longest body. Returns the streams to cut, usually none. It is this
        stream if `peer` exceeds the limit of one peer. If all peers together exceed theirs, it is every
        stream of the peer with the most bytes."""
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
            largest_holder = max(self._held, key=self.of)
            return list(self._held[largest_holder])
        return []

    def of(self, peer: PeerId) -> int:
        """Return the bytes that a peer holds over all its streams."""
        return sum(self._held.get(peer, {}).values())


class Pace:
    """Detect a stream that does not deliver what it has begun. Only bytes of message bodies count, of any
    message: a less urgent one may wait while others pass it on the same stream. Keep-alives do not count."""

    def __init__(self) -> None:
        self.until = float("inf")
        """Time at which the stream counts as too slow."""
        self._received_bytes = 0  # Bytes of bodies since the time limit started.

    def came(self, body_bytes: int, unfinished: bool, now: float) -> None:
        """Record received bytes of bodies, and whether a message is unfinished after them. The time limit
        starts with an unfinished message, restarts after `PACE_BYTES`, and ends when none is unfinished."""
        self._received_bytes += body_bytes
        if not unfinished:
            self.until = float("inf")
        elif self.until == float("inf") or self._received_bytes >= PACE_BYTES:
            self.until = now + PACE_SECONDS
            self._received_bytes = 0

    def paused(self, now: float) -> None:
        """Restart the time limit after this peer itself has not read for a while."""
        if self.until != float("inf"):
            self.until = now + PACE_SECONDS
            self._received_bytes = 0
