"""What an observer knows of each peer: its newest record, whether it responds, and how it left.

A record outlives its peer by up to two minutes, so the observer also asks each peer. It asks peers of small
stages often, those of large stages seldom (docs/decisions/0012-observer.md). A peer that never responded here
(perhaps only others can reach it) counts as present while its records are fresh. Times are seconds on the
directory's clock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from peers.network.discovery.claimed_tokens import Contributions
from peers.telemetry.event import short
from peers.telemetry.reasons import DEPARTURES
from peers.telemetry.snapshot import Happened
from protocols.signed.peer_record import PeerRecord
from protocols.signed.records import ANNOUNCE_SECONDS, RECORD_SECONDS, SignedRecord
from swarmnet.identifiers import PeerId

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
    events: deque[Happened] = field(default_factory=lambda: deque(maxlen=KEPT_EVENTS))
    """Arrivals and departures, oldest first."""
    left_out: int = 0
    """Records beyond MAX_PEERS in the last walk."""
    _finding_no_room: int = 0
    """Records beyond MAX_PEERS in the current walk."""
    _has_walked: bool = False

    # -- what happens ---------------------------------------------------------------------------------

    def recorded(self, signed: SignedRecord, now: float) -> None:
        """Take a verified record; one that is not newer changes nothing."""
        known, record = self.peers.get(signed.peer), signed.record
        expired = signed.expires_seconds < now
        if record.stage >= self.stages or expired or (known and known.sequence >= signed.sequence):
            return
        if known is None:
            if len(self.peers) >= MAX_PEERS:
                self._finding_no_room += 1
                return
            self.peers[signed.peer] = PeerObservation(record, signed.sequence, now)
            self.contributions.first(record)
            if self.away.pop(signed.peer, None) is not None:
                self._add_event(record, "came", "is back", now)
            elif self._has_walked:
                self._add_event(record, "came", "announces itself", now)
            return
        self._changed(known, signed, now)

    def walked(self) -> None:
        """Called when the directory was read once more, as far as it responded."""
        self.left_out, self._finding_no_room = self._finding_no_room, 0
        self._has_walked = True

    def _changed(self, known: PeerObservation, signed: SignedRecord, now: float) -> None:
        """Store a peer's newer record, compute its speeds from the difference, and log a pause, a move or a
        return."""
        old, new = known.record, signed.record
        if not known.gone:
            if new.state == "paused" != old.state:
                self._departs(known, "paused", now)
            elif new.stage != old.stage and old.stage >= 0:
                self._departs(known, "moved", now)
        seconds = (signed.sequence - known.sequence) / 1e6
        known.tokens_per_second = self.contributions.grown(old, new) / seconds
        known.sent_bytes_per_second = growth(old.sent_bytes, new.sent_bytes) / seconds
        known.received_bytes_per_second = growth(old.received_bytes, new.received_bytes) / seconds
        known.record, known.sequence = new, signed.sequence
        if known.gone and known.signed_at > known.gone_at:  # It is alive, although it does not respond here.
            known.answers, known.misses, known.ask_at = False, 0, now
            self._returns(known, now)
        elif known.gone and new.state == "leaving":  # Its last record was found late.
            known.gone = self.away[PeerId(new.peer)] = "left"

    def answered(self, peer: PeerId, now: float) -> None:
        known = self.peers.get(peer)
        if known is None:
            return
        known.asking, known.answers, known.misses = False, True, 0
        if known.gone:
            self._returns(known, now)
        known.ask_at = now + self._period(known)

    def would_depart(self, peer: PeerId) -> bool:
        """Return whether one more failed request makes this peer count as gone without a goodbye."""
        known = self.peers.get(peer)
        if known is None or known.gone or not known.answers or known.record.state == "leaving":
            return False
        return known.misses + 1 >= MISSES

    def missed(self, peer: PeerId, code: Miss, now: float) -> None:
        """Called when a request failed."""
        known = self.peers.get(peer)
        if known is None:
            return
        known.asking = False
        known.misses += 1
        if known.answers and known.misses < MISSES:
            known.ask_at = now + AGAIN_SECONDS
            return
        known.ask_at = now + max(STRANGER_ASK_SECONDS, self._period(known))
        if known.answers and not known.gone:
            self._departs(known, "left" if known.record.state == "leaving" else code, now, away=True)

    def look(self, now: float) -> None:
        """Called regularly: drop expired records, and treat silent peers with old records as gone."""
        for peer, known in list(self.peers.items()):
            if known.signed_at + RECORD_SECONDS < now:
                if not known.gone:
                    self._departs(known, "silent", now, away=True)
                del self.peers[peer]
            elif not (known.gone or known.answers) and known.signed_at + FRESH_SECONDS < now:
                code = "left" if known.record.state == "leaving" else "silent"
                self._departs(known, code, now, away=True)

    def _departs(self, known: PeerObservation, code: str, now: float, away: bool = False) -> None:
        record = known.record
        self.departures[code] += 1
        level = "warning" if code in ("silent", "not_reached") else "info"
        self._add_event(record, code, DEPARTURES[code].meaning, now, level)
        if away:
            known.gone, known.gone_at = code, now
            self.away[PeerId(record.peer)] = code
            while len(self.away) > MAX_PEERS:
                del self.away[next(iter(self.away))]

    def _returns(self, known: PeerObservation, now: float) -> None:
        known.gone = ""
        self.away.pop(PeerId(known.record.peer), None)
        self._add_event(known.record, "came", "is back", now)

    def _add_event(self, record: PeerRecord, code: str, what: str, now: float, level: str = "info") -> None:
        where = f" of stage {record.stage}" if record.stage >= 0 else ""
        text = f"{record.name or short(record.peer)}{where}: {what}"
        self.events.append(Happened(now, code, text, level))

    # -- what follows ---------------------------------------------------------------------------------

    def _period(self, known: PeerObservation) -> float:
        peers = sum(other.record.stage == known.record.stage for other in self.peers.values())
        return min(LONGEST_ASK_SECONDS, max(SHORTEST_ASK_SECONDS, ASK_SECONDS_PER_PEER * peers))

    def due(self, now: float, most: int) -> list[PeerId]:
        """Return up to `most` peers to ask now, the longest overdue first, and mark them as being asked."""
        waiting = [(known.ask_at, peer) for peer, known in self.peers.items()
                   if not known.asking and known.ask_at <= now]  # fmt: skip
        due = [peer for _, peer in sorted(waiting)[:most]]
        for peer in due:
            self.peers[peer].asking = True
        return due

    def here(self) -> Iterator[PeerObservation]:
        return (known for known in self.peers.values() if not known.gone)


def growth(before: int, after: int) -> int:
    """Return the growth of a count; a smaller one has restarted at 0."""
    return after - before if after >= before else after
