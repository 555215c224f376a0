"""A worker's regular look-ups: find other peers, and detect a split of the DHT."""

from __future__ import annotations

from peers.network.discovery.announcer import RecordAnnouncer
from peers.network.peer_links import PeerLinks
from peers.telemetry.events import Notify
from swarmnet.identifiers import PeerId
from swarmnet.membership.dht_partition import DirectorySplit
from swarmnet.membership.machine import Membership
from swarmnet.membership.overlay import RINGS

ENOUGH = RINGS
"""Number of active peers of the group that suffices to learn its state: a large group's neighbours on one
side."""
RECORD_LOOKS = 13
"""Number of look-ups, 10 s apart, that last longer than a record (`RECORD_SECONDS`, 120 s)."""


class PeerDiscovery:
    """Looks up other peers and this peer's own record in the directory."""

    def __init__(
        self, presence: RecordAnnouncer, neighbourhood: PeerLinks, stages: int, notify: Notify
    ) -> None:
        """Create the look-ups. `stages` is the number of stages of the run."""
        self.presence = presence
        self.neighbourhood = neighbourhood
        self.stages = stages
        self.notify = notify
        self.split = DirectorySplit()
        self._others = dict.fromkeys(range(stages), RECORD_LOOKS)
        """Stages where another process may use this identity, with the number of look-ups in a row without
        its record."""

    async def look(self) -> None:
        """Look up the peers of this peer's own stage and of the adjacent stages."""
        membership = self.neighbourhood.membership
        # Before the own stage: a newer own record would hide the other process's.
        await self._look_for_own(set(range(self.stages)) - {membership.stage, *membership.beside})
        answered: set[int] = set()
        found: set[PeerId] = set()
        for stage in sorted({membership.stage, *membership.beside}):
            if not 0 <= stage < self.stages:
                continue
            records = await self.presence.look_up(stage)
            if records is None:
                continue
            answered.add(stage)
            found.update(records)
            self.neighbourhood.learn_all(records.values())
        if answered:
            self._compare(answered, found)

    async def _look_for_own(self, stages: set[int]) -> None:
        """Look up records of this peer's own key in these stages: first in all, then where one was found."""
        me = self.neighbourhood.membership.me
        for stage in sorted(stages & self._others.keys()):
            records = await self.presence.look_up(stage)
            # Another call may have dropped the stage while this one waited for the directory.
            if records is None or stage not in self._others:
                continue
            self._others[stage] += 1
            if me in records:
                self._others[stage] = 0
                self.neighbourhood.learn_all([records[me]])
            elif self._others[stage] > RECORD_LOOKS:
                del self._others[stage]

    def _compare(self, answered: set[int], found: set[PeerId]) -> None:
        """Compare the linked peers with the peers that were found, and report a split of the directory."""
        peers = self.neighbourhood.known().items()
        linked = [peer for peer, known in peers if known.linked and known.stage in answered]
        before = self.split.suspected
        self.split.looked(linked, found)
        if self.split.suspected and not before:
            self.notify(
                "directory_split",
                f"the directory may have split: it does not return {len(self.split.missing)} of the "
                f"{len(linked)} peers that are linked here, so newcomers may find only some of all. A peer "
                "that names bootstraps of both parts joins them",
            )
        elif before and not self.split.suspected:
            self.notify("directory_whole", "the directory returns the linked peers again")


def met(membership: Membership) -> bool:
    """Return True if enough of the group is linked to learn its state.

    That is the case if all neighbours in the group are linked, or if enough active peers are. It also holds
    if one active peer is linked and the others did not answer. A record outlives its peer by up to two
    minutes, and the many records of a Sybil attack never answer. If no peer is active, silent peers are
    waited for: all may be restarting and must agree."""
    if sum(known.linked and known.ready for known in membership.peers.values()
           if known.stage == membership.stage) >= ENOUGH:  # fmt: skip
        return True
    group = [
        known
        for peer, known in membership.peers.items()
        if known.stage == membership.stage and (peer in membership.wanted() or not known.present)
    ]
    if not any(known.linked for known in group):
        return False
    if all(known.linked for known in group):
        return True
    tried = all(known.linked or (known.failures > 0 and not known.dialing) for known in group)
    return tried and any(known.linked and known.ready for known in group)
