"""Messages of membership: joining, heartbeats, leaving, the manifest of the run, and its owner's orders.

See table.py and docs/wire.md for the message numbers and other properties.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from protocols.fields import (
    BodyLimit,
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
from swarmnet.run.canonical_form import MANIFEST_LIMIT
from swarmnet.run.owner_orders import ORDER_LIMIT


class Hello(Message, frozen=True, tag=1):
    """The first message on every link."""

    before_hello: ClassVar[bool] = True
    wire_version: Number
    run_id: Digest
    record: bytes
    """The sender's signed `PeerRecord`; empty for a peer without a stage (bootstrap, observer)."""
    invite: Invite = b""
    """Proof that the owner admits the sender (protocols/signed/invites.py); needed if the run is by invite.
    It never contains the secret of an invite."""


class Refuse(Message, frozen=True, tag=2):
    """The reason why the sender closes the link. `code` is a WireError code."""

    code: Name
    reason: Reason


class PeerRecords(Message, frozen=True, tag=3):
    """Signed PeerRecords of other peers, so that a newcomer need not wait for the DHT."""

    records: list[bytes]


class Heartbeat(Message, frozen=True, tag=4):
    """A heartbeat with the sender's load, sent at least every `BEAT_SECONDS` on the group lane."""

    sequence: Number
    echo: NumberOrNone
    """The last sequence received from the other side, for round-trip times; -1 if none."""
    echo_delay: Seconds
    """Seconds between receiving that heartbeat and sending this one."""
    stage: StageNumber
    ready: bool
    """True if the sender accepts microbatches."""
    slots: Number
    """Number of microbatches that the sender would accept now from any peer."""
    service_seconds: Seconds
    """The sender's compute time per microbatch, forward and backward together."""
    round: RoundNumber
    wanted: bool
    """True if the sender wants to keep a link to the receiver (swarmnet/membership/overlay.py). A link that
    neither side wants is closed after a while."""
    moving_to: StageNumber = -1
    """The stage that the sender wants to move to (swarmnet/placement/policy.py); -1 if it stays."""


class Bye(Message, frozen=True, tag=5):
    """The sender is leaving."""

    reason: Reason


class GetManifest(Message, frozen=True, tag=40):
    """Request the manifest. It is allowed before `Hello`, so that a newcomer can learn the run."""

    before_hello: ClassVar[bool] = True


class ManifestResponse(Message, frozen=True, tag=41):
    """The manifest. Body: the canonical manifest, then the owner's 64-byte signature."""

    body: ClassVar[BodyLimit] = lambda run: MANIFEST_LIMIT


class OrderUpdate(Message, frozen=True, tag=60):
    """The newest order that the sender knows; sent when a link opens and when a newer order arrives. An order
    is verified from its own signature, so it is accepted even before `Hello`."""

    before_hello: ClassVar[bool] = True
    order: Annotated[bytes, Meta(max_length=ORDER_LIMIT)]
    """The owner's signed envelope (protocols/signed/orders.py)."""
