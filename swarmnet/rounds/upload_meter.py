"""What peers measure of each other's uploads. It bounds what a record claims, because a peer is drawn as a
reducer by its upload.

A peer measures how fast each neighbour sends the contributions that it requested. Only slow transfers tell
something about the sender: a fast one may be short. Each record lists what its peer has measured (*reports*).
All peers of a group read the same records, so they draw the same reducers.

A sender serves many peers at a time, so each measures a part of its upload. The bound is the middle report
times the number of reports. It holds as long as fewer than half of the peers that report on a peer lie, in
either direction.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, log2

from swarmnet.identifiers import ContributionId, PeerId
from swarmnet.rounds.result_table import tag_of

SLOW_SECONDS = 2.0
"""Transfers that take less are fast. Rounds of seconds do not wait for them."""
SAMPLES = 4
"""A peer reports on a sender from so many transfers on, by the fastest of the newest ones."""
REMEMBERED_SECONDS = 1800.0
"""Then a transfer is forgotten, so that a faster line is noticed. The peer may then be drawn again."""
MAX_REPORTS = 32
"""Maximum number of peers on which a record reports."""
REPORTED_TAG_BYTES = 8
REPORT_BYTES = REPORTED_TAG_BYTES + 1
FAST = 63
"""The report of a peer whose transfers were fast. Other reports are the logarithm to base 2 of bytes per
second, rounded down."""


@dataclass(slots=True)
class _Transfers:
    """The transfers from one sender that overlap in time."""

    since: float
    open: set[ContributionId] = field(default_factory=set)
    received: int = 0


class UploadMeter:
    """What this peer has measured of the uploads of its neighbours. Times are in seconds."""

    def __init__(self) -> None:
        self._transfers: dict[PeerId, _Transfers] = {}
        self._sender: dict[ContributionId, PeerId] = {}
        """Contribution -> the neighbour from which it was requested last."""
        self._rates: dict[PeerId, deque[tuple[float, float]]] = {}
        """Sender -> times and rates of its newest transfers, in bytes per second; infinite if fast. The
        sender measured last comes last, and at most `MAX_REPORTS` are remembered."""

    def requested(self, identity: ContributionId, sender: PeerId, now: float) -> None:
        """Record a request to a neighbour. It ends an earlier one for the same contribution."""
        self.ended(identity, now)
        self._sender[identity] = sender
        self._transfers.setdefault(sender, _Transfers(now)).open.add(identity)

    def arrived(self, identity: ContributionId, sender: PeerId, size: int, now: float) -> None:
        """Record that a contribution of so many bytes arrived, and end the request for it."""
        if self._sender.get(identity) == sender:
            self._transfers[sender].received += size
        self.ended(identity, now)

    def ended(self, identity: ContributionId, now: float) -> None:
        """End the request for a contribution, if there is one."""
        sender = self._sender.pop(identity, None)
        if sender is None:
            return
        transfers = self._transfers[sender]
        transfers.open.remove(identity)
        if transfers.open:
            return
        del self._transfers[sender]
        seconds = now - transfers.since
        if seconds >= SLOW_SECONDS:
            self._record(sender, now, transfers.received / seconds)
        elif transfers.received:
            self._record(sender, now, inf)

    def left(self, sender: PeerId) -> None:
        """Ignore what was requested from a neighbour that has left."""
        transfers = self._transfers.pop(sender, None)
        for identity in transfers.open if transfers is not None else ():
            del self._sender[identity]

    def reports(self, now: float) -> bytes:
        """Return what this peer reports of its neighbours, as `read_reports` reads it."""
        oldest = now - REMEMBERED_SECONDS
        return b"".join(
            short_tag(sender) + bytes([_level(max(rate for _, rate in rates))])
            for sender, rates in self._rates.items()
            if len(rates) == SAMPLES and rates[0][0] >= oldest
        )

    def _record(self, sender: PeerId, now: float, rate: float) -> None:
        rates = self._rates.pop(sender, deque(maxlen=SAMPLES))
        rates.append((now, rate))
        self._rates[sender] = rates
        if len(self._rates) > MAX_REPORTS:
            del self._rates[next(iter(self._rates))]


def read_reports(reports: bytes) -> dict[bytes, int]:
    """Return the report on each peer, by the first bytes of its tag."""
    entries = (reports[start : start + REPORT_BYTES] for start in range(0, len(reports), REPORT_BYTES))
    return {entry[:-1]: entry[-1] for entry in entries if len(entry) == REPORT_BYTES}


@lru_cache(8)
def measured_uploads(reports: frozenset[tuple[PeerId, bytes]]) -> Mapping[bytes, float]:
    """Return the upload in bytes per second that is known of peers, by the first bytes of their tags;
    infinite if most peers that report on one call it fast. `reports` has each peer of a group with what it
    reports. What a peer reports on itself is ignored."""
    by_tag: defaultdict[bytes, list[int]] = defaultdict(list)
    for peer, of_peer in reports:
        for tag, level in read_reports(of_peer).items():
            if tag != short_tag(peer):
                by_tag[tag].append(level)
    return {tag: _bound(levels) for tag, levels in by_tag.items()}


def short_tag(peer: PeerId) -> bytes:
    """Return the bytes by which reports name a peer."""
    return tag_of(peer)[:REPORTED_TAG_BYTES]


def _level(rate: float) -> int:
    return FAST if rate == inf else min(FAST - 1, int(log2(max(1.0, rate))))


def _bound(levels: Iterable[int]) -> float:
    """Return the upload at which a peer sends, from at least one report. Even halves are in its favour, and
    so is the rounding of reports."""
    ordered = sorted(levels)
    middle = ordered[len(ordered) // 2]
    return inf if middle >= FAST else len(ordered) * 2.0 ** (middle + 1)
