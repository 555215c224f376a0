"""What an observer knows of each peer: its newest record, whether it responds, and how it left.

A record is a peer's signed announcement in the directory, a DHT. A peer is *gone* once it left or no longer
responds. A record outlives its peer by up to two minutes, so the observer also asks each peer. It asks peers
of small stages often, those of large stages seldom (docs/decisions/0012-observer.md). A peer that never
responded here (perhaps only others can reach it) counts as present while its records are fresh. Times are
seconds on the directory's clock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from peers.network.discovery.claimed_tokens import Contributions
from peers.telemetry.event import short
from peers.telemetry.reasons import DEPARTURES
from peers.telemetry.snapshot import ShownEvent
from protocols.signed.peer_record import PeerRecord
from protocols.signed.records import ANNOUNCE_SECONDS, RECORD_SECONDS, SignedRecord
from swarmnet.identifiers import PeerId
from swarmnet.run.progress import RoundPace

SHORTEST_ASK_SECONDS = 3.0
LONGEST_ASK_SECONDS = 60.0
ASK_SECONDS_PER_PEER = 0.25
"""A stage gets four requests a second in all. A thousand peers in eight stages cost 32 requests a second; in
a stage of up to twelve peers each is asked every 3 s."""
STRANGER_ASK_SECONDS = 10.0
"""Minimum interval for peers that never responded here or stopped responding."""
AGAIN_SECONDS = 1.0
"""Delay after one failed request, which may have been this machine's fault."""
MISSES = 2
"""Failed requests in a row until a peer counts as gone."""
FRESH_SECONDS = 1.5 * ANNOUNCE_SECONDS
"""Maximum age of a record whose peer does not respond here; one announcement may be lost."""
MAX_PEERS = 4096
"""Further peers are counted and otherwise left out, because keys cost nothing to make."""
KEPT_EVENTS = 50

Miss = Literal["silent", "not_reached"]
"""Codes of `DEPARTURES` (peers/telemetry/reasons.py); `left`, `moved` and `paused` are others."""


@dataclass(slots=True)
class PeerObservation:
    """One peer. `gone` is the code of its departure while it is away."""

    record: PeerRecord
    sequence: int
    ask_at: float
    state_since: float
    """When this observer first saw the peer in its present state."""
    answers: bool = False
    """Whether it has responded here since it came."""
    misses: int = 0
    gone: str = ""
    gone_at: float = float("-inf")
    asking: bool = False
    tokens_per_second: float | None = None
    """Rates between its two newest records; None if there is only one."""
    sent_bytes_per_second: float | None = None
    received_bytes_per_second: float | None = None

    @property
    def signed_at(self) -> float:
        return self.sequence / 1e6


@dataclass(slots=True)
class PeerObservations:
    """All peers of a run that are or were in its directory."""

    stages: int
    peers: dict[PeerId, PeerObservation] = field(default_factory=dict)
    contributions: Contributions = field(default_factory=Contributions)
    departures: Counter[str] = field(default_factory=Counter)
    """Departure code -> number since the observer started; only grows."""
    away: dict[PeerId, str] = field(default_factory=dict)
    """Peers that left and have not come back -> departure code."""
    events: deque[ShownEvent] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    """Arrivals and departures, oldest first."""
    pace: RoundPace = field(default_factory=RoundPace)
    """How fast the run's rounds follow each other."""
    left_out: int = 0
    """Records beyond MAX_PEERS in the last walk."""
    _left_out_in_this_walk: int = 0
    """Records beyond MAX_PEERS in the current walk."""
    _has_walked: bool = False

    # -- updates --------------------------------------------------------------------------------------

    def recorded(self, signed: SignedRecord, now: float) -> None:
        """Store a verified record, and log an arrival. Expired records, those that are not newer and those of
        an unknown stage change nothing. A new peer beyond MAX_PEERS is only counted. In the first walk no new
        peer is logged as an arrival: all were there before this observer."""
        observed, record = self.peers.get(signed.peer), signed.record
        expired = signed.expires_seconds < now
        if record.stage >= self.stages or expired:
            return
        if observed is not None and observed.sequence >= signed.sequence:
            return  # Not newer: the sequence grows with each record of a peer.
        if observed is None:
            if len(self.peers) >= MAX_PEERS:
                self._left_out_in_this_walk += 1
                return
            self.peers[signed.peer] = PeerObservation(record, signed.sequence, now, now)
            self.contributions.add(record, signed.sequence / 1e6)
            if self.away.pop(signed.peer, None) is not None:
                self._add_event(record, "came", "is back", now)
            elif self._has_walked:
                self._add_event(record, "came", "announces itself", now)
            return
        self._update(observed, signed, now)

    def walked(self) -> None:
        """End a walk: all stages were read once, as far as the directory responded."""
        self.left_out = self._left_out_in_this_walk
        self._left_out_in_this_walk = 0
        self._has_walked = True

    def _update(self, observed: PeerObservation, signed: SignedRecord, now: float) -> None:
        """Store a peer's newer record, and compute its rates from the difference. A pause, a move to another
        stage and a return are logged. `stage` is -1 for a peer without one."""
        old, new = observed.record, signed.record
        if not observed.gone:
            if new.state == "paused" and old.state != "paused":
                self._record_departure(observed, "paused", now)
            elif new.stage != old.stage and old.stage >= 0:
                self._record_departure(observed, "moved", now)
        seconds = (signed.sequence - observed.sequence) / 1e6  # A sequence is a time in microseconds.
        observed.tokens_per_second = self.contributions.add(new, signed.sequence / 1e6) / seconds
        observed.sent_bytes_per_second = growth(old.sent_bytes, new.sent_bytes) / seconds
        observed.received_bytes_per_second = growth(old.received_bytes, new.received_bytes) / seconds
        if (old.stage, old.state) != (new.stage, new.state):
            observed.state_since = now
        observed.record, observed.sequence = new, signed.sequence
        if observed.gone and observed.signed_at > observed.gone_at:
            # It has signed a record since it was gone: it is alive, although it does not respond here.
            observed.answers = False
            observed.misses = 0
            observed.ask_at = now
            self._record_return(observed, now)
        elif observed.gone and new.state == "leaving":
            # The record from before its end says that it left, instead of how this observer lost it.
            observed.gone = "left"
            self.away[PeerId(new.peer)] = "left"

    def answered(self, peer: PeerId, now: float) -> None:
        """Record that a peer has responded at time `now`. A peer that was gone is back."""
        observed = self.peers.get(peer)
        if observed is None:
            return
        observed.asking = False
        observed.answers = True
        observed.misses = 0
        if observed.gone:
            self._record_return(observed, now)
        observed.ask_at = now + self._ask_interval(observed)

    def would_depart(self, peer: PeerId) -> bool:
        """Return whether one more failed request makes this peer count as gone without a goodbye."""
        observed = self.peers.get(peer)
        if observed is None or observed.gone or not observed.answers or observed.record.state == "leaving":
            return False
        return observed.misses + 1 >= MISSES

    def missed(self, peer: PeerId, code: Miss, now: float) -> None:
        """Record that a request failed, with the reason `code`. A peer that responded before is gone after
        MISSES failures in a row, and is asked again soon until then. Other peers are asked less often."""
        observed = self.peers.get(peer)
        if observed is None:
            return
        observed.asking = False
        observed.misses += 1
        if observed.answers and observed.misses < MISSES:
            observed.ask_at = now + AGAIN_SECONDS
            return
        observed.ask_at = now + max(STRANGER_ASK_SECONDS, self._ask_interval(observed))
        if observed.answers and not observed.gone:
            has_said_goodbye = observed.record.state == "leaving"
            self._record_departure(observed, "left" if has_said_goodbye else code, now, away=True)

    def look(self, now: float) -> None:
        """Drop records older than RECORD_SECONDS; their peers are gone. A peer that never responded here is
        gone as soon as its record is older than FRESH_SECONDS."""
        for peer, observed in list(self.peers.items()):
            if observed.signed_at + RECORD_SECONDS < now:
                if not observed.gone:
                    self._record_departure(observed, "silent", now, away=True)
                del self.peers[peer]
                continue
            is_fresh = observed.signed_at + FRESH_SECONDS >= now
            if not observed.gone and not observed.answers and not is_fresh:
                code = "left" if observed.record.state == "leaving" else "silent"
                self._record_departure(observed, code, now, away=True)

    def _record_departure(self, observed: PeerObservation, code: str, now: float, away: bool = False) -> None:
        """Count and log a departure. `code` says how the peer left. With `away`, the peer is gone; else it
        paused or moved to another stage. Only the newest MAX_PEERS peers that are away are remembered."""
        record = observed.record
        self.departures[code] += 1
        level = "warning" if code in ("silent", "not_reached") else "info"
        self._add_event(record, code, DEPARTURES[code].meaning, now, level)
        if away:
            observed.gone, observed.gone_at = code, now
            self.away[PeerId(record.peer)] = code
            while len(self.away) > MAX_PEERS:
                del self.away[next(iter(self.away))]

    def _record_return(self, observed: PeerObservation, now: float) -> None:
        observed.gone = ""
        self.away.pop(PeerId(observed.record.peer), None)
        self._add_event(observed.record, "came", "is back", now)

    def _add_event(self, record: PeerRecord, code: str, what: str, now: float, level: str = "info") -> None:
        """Append an event to the list for people; `what` says what the peer did."""
        where = f" of stage {record.stage}" if record.stage >= 0 else ""
        text = f"{record.name or short(record.peer)}{where}: {what}"
        self.events.append(ShownEvent(now, code, text, level))

    # -- queries --------------------------------------------------------------------------------------

    def _ask_interval(self, observed: PeerObservation) -> float:
        """Return the seconds between two requests to this peer; longer in large stages."""
        peers = sum(other.record.stage == observed.record.stage for other in self.peers.values())
        return min(LONGEST_ASK_SECONDS, max(SHORTEST_ASK_SECONDS, ASK_SECONDS_PER_PEER * peers))

    def due(self, now: float, most: int) -> list[PeerId]:
        """Return up to `most` peers to ask now, the longest overdue first, and mark them as being asked."""
        waiting = [
            (observed.ask_at, peer)
            for peer, observed in self.peers.items()
            if not observed.asking and observed.ask_at <= now
        ]
        due = [peer for _, peer in sorted(waiting)[:most]]
        for peer in due:
            self.peers[peer].asking = True
        return due

    def here(self) -> Iterator[PeerObservation]:
        return (observed for observed in self.peers.values() if not observed.gone)


def growth(before: int, after: int) -> int:
    """Return the growth of a count; a smaller one has restarted at 0."""
    return after - before if after >= before else after
