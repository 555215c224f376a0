"""Decides when a running peer contacts its bootstraps again, so that newcomers still find it.

A bootstrap is a peer of known address through which newcomers enter the DHT. After a restart its routing
table is empty, and it learns of a peer only if that peer contacts it. *Remembered* peers are others whose
addresses this peer has kept.
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
class _Contact:
    """One bootstrap or remembered peer: when it is contacted next, how many requests in a row have failed,
    whether the last one was answered, and whether it is in this peer's routing table."""

    ask_at: float
    failures: int = 0
    answered: bool = False
    in_table: bool = False


class BootstrapContacts:
    """The bootstraps of one peer, or its remembered peers if it names no bootstrap."""

    def __init__(self, bootstraps: Iterable[PeerId], chance: Random) -> None:
        self._bootstraps = frozenset(bootstraps)
        self._chance = chance
        self._contacts: dict[PeerId, _Contact] = {}
        self._table_is_empty = True
        self.lost = False
        """True while the routing table holds no bootstrap and the last request to each has failed."""

    @property
    def wants_remembered(self) -> bool:
        """True if `look` has a use for remembered peers."""
        return self.lost or not self._bootstraps

    def look(self, table: Collection[PeerId], remembered: Iterable[PeerId], now: float) -> list[PeerId]:
        """Return the peers to contact now. `table`: the peers in this peer's DHT routing table.

        They are the bootstraps that are due. Some due remembered peers are added while `lost` is true. The
        same is done while the table is empty if this peer names no bootstrap. A peer that has just left the
        table is due at once unless its last request failed."""
        self._table_is_empty = not table
        wanted = set(self._bootstraps)
        if self.lost or (not self._bootstraps and not table):
            wanted.update([peer for peer in remembered if peer not in table][:MAX_REMEMBERED])
        self._contacts = {peer: contact for peer, contact in self._contacts.items() if peer in wanted}
        for peer in sorted(wanted):
            contact = self._contacts.setdefault(peer, _Contact(now + self._with_jitter(FIRST_ASK_SECONDS)))
            left_table = contact.in_table and peer not in table
            contact.in_table = peer in table
            if left_table and not contact.failures:
                contact.ask_at = now
        self._update_lost()
        return [peer for peer, contact in self._contacts.items() if now >= contact.ask_at]

    def record_answer(self, peer: PeerId, answered: bool, now: float) -> None:
        """Record the outcome of a request. The next one follows later after each failure."""
        contact = self._contacts.get(peer)
        if contact is None:
            return
        contact.answered = answered
        if answered:
            contact.failures = 0
            contact.ask_at = now + self._with_jitter(STEADY_SECONDS)
        else:
            pause = doubled(FIRST_ASK_SECONDS, contact.failures, LONGEST_ASK_SECONDS)
            contact.ask_at = now + self._with_jitter(pause)
            contact.failures += 1
        self._update_lost()

    def _update_lost(self) -> None:
        """Set `lost`: no bootstrap is in the table, and the last request to each has failed. If this peer
        names no bootstrap, the remembered peers count in their place, and an empty table is required. While
        some of them were not asked yet, `lost` stays as it was."""
        if not self._bootstraps and not self._table_is_empty:
            self.lost = False
            return
        peers = self._bootstraps or self._contacts.keys()
        counted = [self._contacts[peer] for peer in peers if peer in self._contacts]
        if any(contact.in_table or contact.answered for contact in counted):
            self.lost = False
        elif counted and all(contact.failures for contact in counted):
            self.lost = True

    def _with_jitter(self, seconds: float) -> float:
        return seconds * self._chance.uniform(1.0 - ASK_JITTER, 1.0 + ASK_JITTER)
