"""Archivists that a newcomer asks when nobody trains its stage any more.

What they offer is taken only if peers of the stage have signed it, besides. They are no peers of the stage:
nobody asks them while one is there that takes part.
"""

from __future__ import annotations

from peers.network.discovery.announcer import Presence
from peers.network.neighbourhood import Neighbourhood
from peers.state.checkpoint_file import STATEMENT_BYTES
from protocols.errors import WireError
from protocols.messages.table import MOST_STATEMENTS, SnapshotRoot, Statements
from protocols.signed.envelope import Kind, open_envelope
from protocols.signed.peer_record import NO_STAGE
from protocols.signed.records import open_record
from swarmnet.identifiers import PeerId
from swarmnet.membership.machine import Known

ROLE = "archivist"
MOST_ASKED = 2
PATIENCE_SECONDS = 60.0
"""For an archivist to read a checkpoint from where it lies."""


class Keepers:
    def __init__(self, presence: Presence, neighbourhood: Neighbourhood, stage: int) -> None:
        self.presence = presence
        self.neighbourhood = neighbourhood
        self.stage = stage
        self._vouched: set[tuple[int, bytes]] = set()
        """(round, chain and digest) that somebody else than who says so has signed."""

    async def reach(self) -> None:
        """Link to some archivists of the run; whoever is not reached is not there."""
        found = await self.presence.look_up(NO_STAGE) or {}
        asked = 0
        for data in found.values():
            try:
                record = open_record(data, self.presence.signed.run_id).record
            except WireError:
                continue
            if record.role == ROLE and asked < MOST_ASKED:
                asked += 1
                await self.neighbourhood.reach(data)

    def linked(self) -> list[PeerId]:
        """Those that can be asked."""
        return [peer for peer, known in self.neighbourhood.known().items() if known.linked and _keeps(known)]

    def is_one(self, peer: PeerId) -> bool:
        known = self.neighbourhood.known().get(peer)
        return known is not None and _keeps(known)

    def hear(self, peer: PeerId, message: Statements) -> None:
        """What an archivist shows as signed by others. Raises WireError for what is not."""
        for data in message.statements[:MOST_STATEMENTS]:
            envelope = open_envelope(data, self.presence.signed.run_id, Kind.SETTLED, STATEMENT_BYTES)
            if envelope.stage == self.stage and envelope.sender != peer:
                self._vouched.add((envelope.round, bytes(envelope.payload)))

    def vouched(self, peer: PeerId, root: SnapshotRoot) -> bool:
        """Whether a peer may offer this root: an archivist only what others have signed."""
        return not self.is_one(peer) or (root.round, root.chain + root.digest) in self._vouched


def _keeps(known: Known) -> bool:
    return (known.role, known.stage) == (ROLE, NO_STAGE)
