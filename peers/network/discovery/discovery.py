"""A worker's regular look-ups: find other peers, and detect a split of the DHT (the directory).

The DHT has split if it no longer returns peers that are linked here: its nodes then form two networks."""

from __future__ import annotations

from peers.network.discovery.announcer import RecordAnnouncer
from peers.network.peer_links import PeerLinks
from peers.telemetry.log_events import Notify
from swarmnet.identifiers import PeerId
from swarmnet.membership.dht_partition import DirectorySplit
from swarmnet.membership.membership import Membership
from swarmnet.membership.overlay import RINGS

ENOUGH = RINGS
"""Number of active peers that suffices to learn a group's state: a large group's neighbours on one side."""
RECORD_LOOKS = 13
"""Number of look-ups, 10 s apart, that last longer than a record (`RECORD_SECONDS`, 120 s)."""


class PeerDiscovery:
    """Looks up other peers and this peer's own record in the directory."""

    def __init__(
        self, *, presence: RecordAnnouncer, neighbourhood: PeerLinks, stages: int, notify: Notify
    ) -> None:
        """Create the look-ups. `stages` is the number of stages of the run."""
        self.presence = presence
        self.neighbourhood = neighbourhood
        self.stages = stages
        self.notify = notify
        self.split = DirectorySplit()
        self._misses = dict.fromkeys(range(stages), RECORD_LOOKS)
        """Stages that are searched for a record of this peer's own key, from another process. Maps stage to
        the number of look-ups in a row without such a record; after `RECORD_LOOKS` the stage is dropped."""

    async def look(self) -> None:
        """Look up the peers of this peer's stage and of the adjacent ones. Pass their records to the
        neighbourhood. Look in the other stages for records of this peer's own key."""
        membership = self.neighbourhood.membership
        # Other stages come first: this peer's newer record in its own stage would hide another process's.
        await self._look_for_own_records(set(range(self.stages)) - {membership.stage, *membership.beside})
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
            self.neighbourhood.learn_found(records)
        if answered:
            self._check_for_split(answered, found)

    async def _look_for_own_records(self, stages: set[int]) -> None:
        """Look for records of this peer's own key in `stages`, except those where many look-ups in a row
        found none. A record that is found goes to the neighbourhood, which detects that another process uses
        the key."""
        me = self.neighbourhood.membership.me
        for stage in sorted(stages & self._misses.keys()):
            records = await self.presence.look_up(stage)
            # Another call may have dropped the stage while this one waited for the directory.
            if records is None or stage not in self._misses:
                continue
            self._misses[stage] += 1
            if me in records:
                self._misses[stage] = 0
                self.neighbourhood.learn_found({me: records[me]})
            elif self._misses[stage] > RECORD_LOOKS:
                del self._misses[stage]

    def _check_for_split(self, answered: set[int], found: set[PeerId]) -> None:
        """Compare the linked peers of the stages in `answered` with the peers that look-ups found there.
        Notify the user when a split of the directory is first suspected, and when it is over."""
        peers = self.neighbourhood.known().items()
        linked = [peer for peer, known in peers if known.linked and known.stage in answered]
        was_suspected = self.split.suspected
        self.split.looked(linked, found)
        if self.split.suspected and not was_suspected:
            self.notify(
                "directory_split",
                f"the directory may have split: it does not return {len(self.split.missing)} of the "
                f"{len(linked)} peers that are linked here, so newcomers may find only some of all. A peer "
                "that names bootstraps of both parts joins them",
            )
        elif was_suspected and not self.split.suspected:
            self.notify("directory_whole", "the directory returns the linked peers again")


def met(membership: Membership) -> bool:
    """Return True if enough peers of this peer's group are linked to learn the group's state from them.

    This holds if all neighbours in the group are linked, or `ENOUGH` active (`ready`) peers. It also holds if
    one active peer is linked and dialling the others failed. Records outlive their peers by up to two
    minutes, and a Sybil attacker can store many. If none is active, all neighbours must be linked: the whole
    group may be restarting and must agree on a state."""
    own_stage = [known for known in membership.peers.values() if known.stage == membership.stage]
    active_count = sum(known.linked and known.ready for known in own_stage)
    if active_count >= ENOUGH:
        return True
    neighbours = [
        known
        for peer, known in membership.peers.items()
        if known.stage == membership.stage and (peer in membership.wanted() or not known.present)
    ]
    if not any(known.linked for known in neighbours):
        return False
    if all(known.linked for known in neighbours):
        return True
    all_tried = all(known.linked or (known.failures > 0 and not known.dialing) for known in neighbours)
    return all_tried and any(known.linked and known.ready for known in neighbours)
