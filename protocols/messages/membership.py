"""Messages of coming, staying and going: who is there, how loaded, and what the run is.

Their numbers and the rest of the table are in table.py and docs/wire.md.
"""

from __future__ import annotations

from typing import ClassVar

from protocols.fields import (
    Digest,
    Invite,
    Message,
    Name,
    Number,
    NumberOrNone,
    Reason,
    RoundNumber,
    Seconds,
    StageNumber,
)


class Hello(Message, frozen=True, tag=1):
    """First on every link."""

    wire_version: Number
    run_id: Digest
    record: bytes
    """The sender's signed PeerRecord, or empty for a peer without a stage (bootstrap, observer)."""
    invite: Invite = b""
    """The proof that the owner lets the sender take part (protocols/signed/invites.py), never the secret of
    an invite; needed where the run's access is by invite."""


class Refuse(Message, frozen=True, tag=2):
    """Why the link is being closed. `code` is a WireError code."""

    code: Name
    reason: Reason


class Known(Message, frozen=True, tag=3):
    """Signed PeerRecords of others, so that a newcomer need not wait for the directory."""

    records: list[bytes]


class Beat(Message, frozen=True, tag=4):
    """Alive, and how loaded. Sent at least every `BEAT_SECONDS` on the group lane."""

    sequence: Number
    echo: NumberOrNone
    """The last sequence seen from the receiver, for round-trip times; -1: none."""
    echo_delay: Seconds
    """Seconds that passed here since that one came."""
    stage: StageNumber
    ready: bool
    """Takes microbatches."""
    slots: Number
    """Microbatches it would take now from anyone."""
    service_seconds: Seconds
    """Own compute per microbatch, forward and backward together."""
    round: RoundNumber
    wanted: bool
    """The receiver is among those that the sender keeps links to (swarmnet/membership/overlay.py); a link
    that neither side wants ends after a while."""
    moving_to: StageNumber = -1
    """The stage that the sender would move to (swarmnet/placement/policy.py); -1: it stays."""


class Bye(Message, frozen=True, tag=5):
    reason: Reason


class AskManifest(Message, frozen=True, tag=40):
    """Allowed before HELLO is answered: it is how a newcomer learns what the run is."""


class ManifestIs(Message, frozen=True, tag=41):
    """Body: the canonical manifest, then the owner's 64-byte signature."""

    body: ClassVar[bool] = True
