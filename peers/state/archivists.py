"""Get weights from archivists when no peer trains this stage any more.

An archivist is a peer that trains nothing, stores checkpoints and offers them as snapshots. The root of a
snapshot names its round, its digest and its chunks. Archivists are asked only while no active peer of the
stage is linked. A snapshot of theirs is accepted only if another peer has signed its digest.
"""

from __future__ import annotations

from peers.network.discovery.announcer import RecordAnnouncer
from peers.network.peer_links import PeerLinks
from peers.state.checkpoint_file import STATEMENT_BYTES
from protocols.errors import WireError
from protocols.messages.table import MAX_STATEMENTS, SnapshotRoot, Statements
from protocols.signed.envelope import EnvelopeKind, open_envelope
from protocols.signed.peer_record import NO_STAGE
from protocols.signed.records import open_record
from swarmnet.identifiers import PeerId
from swarmnet.membership.peer_info import PeerInfo

ROLE = "archivist"
MAX_ASKED = 2
PATIENCE_SECONDS = 60.0
"""Seconds that an archivist has to read a checkpoint from its store."""


class ArchivistClients:
    """Links to archivists and keeps the signatures that they present."""

    def __init__(self, presence: RecordAnnouncer, neighbourhood: PeerLinks, stage: int) -> None:
        self.presence = presence
        self.neighbourhood = neighbourhood
        self.stage = stage
        self._vouched: set[tuple[int, bytes]] = set()
        """Pairs of round and (chain + digest) that a peer other than the presenting archivist has signed."""

    async def reach(self) -> None:
        """Look up archivists of the run and try to link to the first `MAX_ASKED` of them."""
        records = await self.presence.look_up(NO_STAGE) or {}
        tried = 0
        for data in records.values():
            try:
                record = open_record(data, self.presence.signed.run_id).record
            except WireError:
                continue
            if record.role == ROLE and tried < MAX_ASKED:
                tried += 1
                await self.neighbourhood.reach(data)

    def linked(self) -> list[PeerId]:
        return [
            peer
            for peer, known in self.neighbourhood.known().items()
            if known.linked and _is_archivist(known)
        ]

    def is_one(self, peer: PeerId) -> bool:
        known = self.neighbourhood.known().get(peer)
        return known is not None and _is_archivist(known)

    def receive(self, peer: PeerId, message: Statements) -> None:
        """Note which weights of this stage other peers have signed, by the statements that an archivist
        `peer` presents. Its own do not count. Raises WireError if one is invalid."""
        for data in message.statements[:MAX_STATEMENTS]:
            envelope = open_envelope(data, self.presence.signed.run_id, EnvelopeKind.SETTLED, STATEMENT_BYTES)
            if envelope.stage == self.stage and envelope.sender != peer:
                self._vouched.add((envelope.round, bytes(envelope.payload)))

    def vouched(self, peer: PeerId, root: SnapshotRoot) -> bool:
        """Return True if a peer may offer this root: an archivist only if another peer signed it."""
        return not self.is_one(peer) or (root.round, root.chain + root.digest) in self._vouched


def _is_archivist(known: PeerInfo) -> bool:
    return (known.role, known.stage) == (ROLE, NO_STAGE)
