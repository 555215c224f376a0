"""Decides when a running peer contacts its bootstraps again, so that newcomers still find it.

A bootstrap returns with an empty routing table, and learns of a peer only if that peer contacts it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from random import Random

from swarmnet.backoff import doubled
from swarmnet.identifiers import PeerId

FIRST_ASK_SECONDS = 5.0
"""Delay of the first request: the shortest absence to notice. An earlier one finds the process dead."""
LONGEST_ASK_SECONDS = 15.0
"""Longest pause between requests to a peer that does not answer. A newcomer trains about 19 s after its start
(measured, scripts/soaks/bootstrap_soak.py). If it finds no other peer until then, it begins a branch."""
STEADY_SECONDS = 30.0
"""Pause between requests to a peer that answers. It may have restarted since, with an empty table. Newcomers
must find the swarm within 60 s of its return: with jitter this leaves 24 s to dial and join."""
ASK_JITTER = 0.2
"""Jitter as a fraction of each pause, as for dials. Peers that lost a bootstrap together ask apart."""
MAX_REMEMBERED = 8
"""Remembered peers that are contacted besides the bootstraps. One that answers is enough."""


@dataclass(slots=True)
class _Way:
    """The state of one bootstrap or remembered peer."""

    ask_at: float
    failures: int = 0
    answered: bool = False
    in_table: bool = False


class BootstrapContacts:
    """The bootstraps of one peer, or its remembered peers if it names no bootstrap."""

    def __init__(self, bootstraps: Iterable[PeerId], chance: Random) -> None:
        self._bootstraps = frozenset(bootstraps)
        self._chance = chance
        self._ways: dict[PeerId, _Way] = {}
        self._table_is_empty = True
        self.lost = False
        """True while the routing table holds no bootstrap and the last request to each has failed."""

    @property
    def wants_remembered(self) -> bool:
        """True if `look` has a use for remembered peers."""
        return self.lost or not self._bootstraps

    def look(self, table: Collection[PeerId], remembered: Iterable[PeerId], now: float) -> list[PeerId]:
        """Return the peers to contact now. `table`: the peers in the routing table; `now` in seconds."""
        self._table_is_empty = not table
        wanted = set(self._bootstraps)
        if self.lost or (not self._bootstraps and not table):
            wanted.update([peer for peer in remembered if peer not in table][:MAX_REMEMBERED])
        self._ways = {peer: way for peer, way in self._ways.items() if peer in wanted}
        for peer in sorted(wanted):
            way = self._ways.setdefault(peer, _Way(now + self._pause(FIRST_ASK_SECONDS)))
            left_table = way.in_table and peer not in table
            way.in_table = peer in table
            if left_table and not way.failures:
                way.ask_at = now
        self._judge()
        return [peer for peer, way in self._ways.items() if now >= way.ask_at]

    def record_answer(self, peer: PeerId, answered: bool, now: float) -> None:
        """Record the outcome of a request. The next one follows later after each failure."""
        way = self._ways.get(peer)
        if way is None:
            return
        way.answered = answered
        if answered:
            way.failures = 0
            way.ask_at = now + self._pause(STEADY_SECONDS)
        else:
            way.ask_at = now + self._pause(doubled(FIRST_ASK_SECONDS, way.failures, LONGEST_ASK_SECONDS))
            way.failures += 1
        self._judge()

    def _judge(self) -> None:
        if not self._bootstraps and not self._table_is_empty:
            self.lost = False
            return
        counted = [self._ways[peer] for peer in self._bootstraps or self._ways if peer in self._ways]
        if any(way.in_table or way.answered for way in counted):
            self.lost = False
        elif counted and all(way.failures for way in counted):
            self.lost = True

    def _pause(self, seconds: float) -> float:
        return seconds * self._chance.uniform(1.0 - ASK_JITTER, 1.0 + ASK_JITTER)
