"""Messages by which a newcomer gets the state of a stage.

Their numbers and the rest of the table are in table.py and docs/wire.md.
"""

from __future__ import annotations

from typing import ClassVar

from msgspec import Struct

from protocols.fields import Digest, Message, Number, RoundNumber, StageNumber


class AskState(Message, frozen=True, tag=30):
    """Answered by State."""

    kind: ClassVar[str] = "snapshot"


class State(Message, frozen=True, tag=31):
    """What a newcomer can get here."""

    kind: ClassVar[str] = "snapshot"
    stage: StageNumber
    round: RoundNumber
    settled: RoundNumber
    digest: Digest
    """Of the settled weights at `settled`."""
    roots: list[bytes]
    """Signed snapshot roots (an envelope around a SnapshotRoot), newest first."""
    oldest_set: RoundNumber
    """First settled round whose set and contributions are still kept here: from the round before it a
    newcomer can go on by contributions alone."""


class SnapshotRoot(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="root"):
    """Signed payload: the settled weights of a stage at a round, in chunks."""

    round: RoundNumber
    stage: StageNumber
    size: Number
    digest: Digest
    """Replica.digest() at that round."""
    chain: Digest
    """The value of the chain of settled sets there."""
    chunks: list[Digest]
    """SHA-256 of each chunk."""


class AskChunk(Message, frozen=True, tag=32):
    kind: ClassVar[str] = "snapshot"
    digest: Digest
    index: Number


class Chunk(Message, frozen=True, tag=33):
    kind: ClassVar[str] = "snapshot"
    priority: ClassVar[int] = 3
    body: ClassVar[bool] = True
    digest: Digest
    index: Number


class NoChunk(Message, frozen=True, tag=34):
    kind: ClassVar[str] = "snapshot"
    digest: Digest
    index: Number
