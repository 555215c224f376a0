"""The signed record in which a peer describes itself in the DHT. A hint until the peer answers."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from protocols.fields import Invite, Name, Number, NumberOrNone, RoundNumber, StageNumber
from protocols.signed.signed_receipts import SEALED_BYTES
from swarmnet.optimizer.agreement.weight_report import REPORT_BYTES as WEIGHTS_BYTES
from swarmnet.rounds.upload_meter import MAX_REPORTS, REPORT_BYTES

NAME_CHARACTERS = 64
"""Maximum number of characters of `name`, as in the peer file."""

State = Annotated[str, Meta(max_length=16, pattern=r"^[a-z_]*\Z")]
"""What the peer is doing; empty if it does not say. Newer versions may use other words.

Known are connecting, joining, training, paused, leaving, and serving (without a stage). The owner's order
causes paused_by_owner (the run is paused) and ended."""
Device = Annotated[str, Meta(max_length=16, pattern=r"^[a-z]*\Z")]
"""cpu, cuda, or a word of a newer version; empty if the peer does not say."""
Loss = Annotated[float, Meta(ge=0.0, le=1e6)]
ExpertGroup = Annotated[int, Meta(ge=-1, lt=256)]
UploadReports = Annotated[bytes, Meta(max_length=MAX_REPORTS * REPORT_BYTES)]
WeightsReport = Annotated[bytes, Meta(max_length=WEIGHTS_BYTES)]
SealedReceipt = Annotated[bytes, Meta(max_length=SEALED_BYTES)]
MAX_VERDICTS = 8
"""Maximum number of peers in a record that its peer avoids."""
MAX_RECEIPTS = 4
"""Maximum number of receipts in a record. Each takes 200 bytes, beside 400 of the record (measured)."""
TOLD_GROUPS = 64
"""Maximum number of expert groups in a record; each takes at most five bytes."""

NO_STAGE = -1
"""The stage of peers that hold none: observers, archivists, and peers that paused themselves.

A paused peer no longer counts as a member of its group, and no peer dials it. If the owner paused the run,
peers keep their stage instead."""


class PeerRecord(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="peer"):
    """A peer's description of itself. All values are unverified claims. Counts restart at 0 when the peer
    starts or moves."""

    peer: Name
    stage: StageNumber
    """The stage; -1 if the peer holds none."""
    role: str
    addresses: list[str]
    """Multiaddrs without the /p2p/ part."""
    round: RoundNumber
    tokens_per_second: float
    """Speed that the peer's hardware could reach, not the speed at which it was given work."""
    version: str
    moving_to: StageNumber = -1
    """The stage that the peer wants to move to, as in `Beat`; -1 if it stays."""
    name: str = ""
    """A name for people, chosen by the peer's owner: at most `NAME_CHARACTERS`, all printable."""
    state: State = ""
    loss: Loss | None = None
    """Mean loss of the newest microbatches that passed this peer, in nats per token. An observer reports the
    loss on text that is not used for training."""
    tokens: Number = 0
    """Number of tokens whose gradients the peer has committed since it started."""
    settled: RoundNumber = -1
    """The newest settled round."""
    checkpoint_round: RoundNumber = -1
    """Round of the newest checkpoint on the peer's disk; -1 if there is none."""
    checkpoint_seconds: float = 0.0
    """Time when that checkpoint was written, in seconds since 1970."""
    sent_bytes: Number = 0
    received_bytes: Number = 0
    started: Number = 0
    """Start time of the peer's process in microseconds of swarm time since 1970; 0 if it does not say. Two
    running processes with the same identity are recognized by it (swarmnet/membership/own_start.py)."""
    invite: Invite = b""
    """The peer's proof of its invite (invites.py), in runs that admit peers by invite. From this field on,
    trailing fields with their default value are not sent."""
    finalized_tokens: NumberOrNone = -1
    """Tokens in all settled rounds of the stage, by all peers, since the run began; -1 if not known."""
    device: Device = ""
    """The device that the peer computes with."""
    joules: Number = 0
    """Energy in joules that the device measured while these tokens were committed; 0 if not measured."""
    text_shards: Number = 0
    """Number of shards of the run's text that the peer has, if it reads the text in epochs; otherwise 0."""
    text_shards_read: Number = 0
    """Number of shards read to their end, in all epochs. Divided by `text_shards`: epochs."""
    up_bytes_per_second: Number = 0
    """Upload bandwidth that the peer allows or measured; 0 if unknown. It can only lower what
    `tokens_per_second` counts for."""
    down_bytes_per_second: Number = 0
    experts_group: ExpertGroup = -1
    """The expert group that the peer trains; -1 if it trains the whole stage or there are no experts."""
    experts_trained: Annotated[tuple[RoundNumber, ...], Meta(max_length=TOLD_GROUPS)] = ()
    """For each of the first groups, the newest settled round in which its experts were trained. -1 if the
    peer has seen none settle."""
    uploads_seen: UploadReports = b""
    """What the peer has measured of the uploads of others, in runs with reducers
    (swarmnet/rounds/upload_meter.py)."""
    vote_weights: WeightsReport = b""
    """What the votes of the stage's contributors weigh, with `sync.weights: agreement`; empty if the peer
    does not report it (swarmnet/optimizer/agreement/weight_report.py)."""
    avoids: Annotated[tuple[tuple[Name, Number, Number], ...], Meta(max_length=MAX_VERDICTS)] = ()
    """Peers of a neighbouring stage that the peer avoided because their answers differed, until they earned
    their trust back: peer id, comparisons that differed, comparisons."""
    receipts: Annotated[tuple[SealedReceipt, ...], Meta(max_length=MAX_RECEIPTS)] = ()
    """The newest receipts for the peer's contributions, oldest first, one for each block of rounds. Other
    peers have signed them (signed_receipts.py): of a record's values, only these are more than claims."""
