"""Detects that the directory (DHT) may have split in two: lookups do not return peers that are linked here.

A link proves that a peer exists. If the directory has no fresh record of it for some time, its records may
not get into the directory. Or this peer reads another part of the directory than that peer writes to. A
single such peer may have its own problem, or fake a split; half of the linked peers or more point to a split.
If a directory splits unevenly, the peers of its smaller part notice it.

The reverse, a record of an unreachable peer, proves nothing: records outlive peers, and firewalls exist.
"""

from __future__ import annotations

from collections.abc import Collection

from swarmnet.identifiers import PeerId

MISSED_LOOKS = 6
"""A peer is missing after this many answered lookups in a row without it. A worker looks up every 10 s, and
three times in its first 3 s. A peer announces itself when it starts and every 30 s."""


class DirectorySplit:
    """The suspicion of one peer. Every lookup in the directory must be passed to `looked`."""

    def __init__(self) -> None:
        self._missed: dict[PeerId, int] = {}
        """Number of lookups in a row without each linked peer."""

    def looked(self, linked: Collection[PeerId], found: Collection[PeerId]) -> None:
        """Record an answered lookup. `linked`: the linked peers, which should be found; `found`: the peers of
        which it returned a valid record. A peer's count of misses in a row restarts when it is found."""
        self._missed = {peer: 0 if peer in found else self._missed.get(peer, 0) + 1 for peer in linked}

    @property
    def missing(self) -> list[PeerId]:
        """Linked peers that are not in the directory."""
        return [peer for peer, missed in self._missed.items() if missed >= MISSED_LOOKS]

    @property
    def suspected(self) -> bool:
        """True if at least half of the linked peers are missing."""
        missing = len(self.missing)
        return missing > 0 and 2 * missing >= len(self._missed)
