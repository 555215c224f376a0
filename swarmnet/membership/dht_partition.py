"""Whether the directory may have split in two: peers are linked here that it does not return.

A link proves that a peer is there. If the directory has had no fresh record of it for some time, then either
that peer does not get its records into the directory, or this peer reads another part of it than that one
writes to. One such peer may have its own trouble, or want to be taken for a split; half of those that are
linked, or more, are suspicious. Where a directory splits unevenly, the peers of its smaller part notice it.

The reverse, a record whose peer is not reached, says nothing: records outlive their peers, and firewalls are
no split.
"""

from __future__ import annotations

from collections.abc import Collection

from swarmnet.identifiers import PeerId

MISSED_LOOKS = 6
"""A peer is missing when so many looks in a row, which the directory answered, have not found it. A worker
looks every 10 s, and three times in its first 3 s; a peer announces itself when it starts and every 30 s."""


class DirectorySplit:
    """Of one peer. Feed it every look at the directory."""

    def __init__(self) -> None:
        self._missed: dict[PeerId, int] = {}
        """Looks in a row without it; of every peer that is linked."""

    def looked(self, linked: Collection[PeerId], found: Collection[PeerId]) -> None:
        """A look that was answered. `linked`: who should be found, `found`: of whom there is a record that
        has not expired."""
        self._missed = {peer: 0 if peer in found else self._missed.get(peer, 0) + 1 for peer in linked}

    @property
    def missing(self) -> list[PeerId]:
        """Linked, but not in the directory."""
        return [peer for peer, missed in self._missed.items() if missed >= MISSED_LOOKS]

    @property
    def suspected(self) -> bool:
        missing = len(self.missing)
        return missing > 0 and 2 * missing >= len(self._missed)
