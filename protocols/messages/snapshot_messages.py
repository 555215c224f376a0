"""Messages by which a newcomer downloads the state of a stage.

See table.py and docs/wire.md for the message numbers and other properties.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from protocols.fields import BodyLimit, Digest, Message, Number, RoundNumber, StageNumber
from swarmnet.snapshots.fetch import chunk_bytes


class GetState(Message, frozen=True, tag=30):
    """Request what the receiver can provide. The answer is `SnapshotOffer`."""

    kind: ClassVar[str] = "snapshot"


class SnapshotOffer(Message, frozen=True, tag=31):
    """What a newcomer can download from the sender."""

    kind: ClassVar[str] = "snapshot"
    stage: StageNumber
    round: RoundNumber
    settled: RoundNumber
    digest: Digest
    """Digest of the settled weights at round `settled`."""
    roots: list[bytes]
    """Signed snapshot roots (an envelope around a `SnapshotRoot`), newest first."""
    oldest_set: RoundNumber
    """First settled round whose set and contributions the sender still keeps. From the round before it, a
    newcomer can continue by contributions alone."""


class SnapshotRoot(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="root"):
    """Signed payload that describes the settled weights of a stage at a round, in chunks."""

    round: RoundNumber
    stage: StageNumber
    size: Number
    digest: Digest
    """The value of `Replica.digest()` at that round."""
    chain: Digest
    """Value of the chain of settled sets at that round."""
    chunks: list[Digest]
    """SHA-256 of each chunk."""


class GetChunk(Message, frozen=True, tag=32):
    """Request one chunk of the state with this digest."""

    kind: ClassVar[str] = "snapshot"
    digest: Digest
    index: Number


class Chunk(Message, frozen=True, tag=33):
    """One chunk. Body: its bytes."""

    kind: ClassVar[str] = "snapshot"
    priority: ClassVar[int] = 3
    body: ClassVar[BodyLimit] = lambda run: min(run.state_bytes, chunk_bytes(run.state_bytes))
    digest: Digest
    index: Number


class NoChunk(Message, frozen=True, tag=34):
    """The sender does not have the requested chunk."""

    kind: ClassVar[str] = "snapshot"
    digest: Digest
    index: Number
