"""What a peer says of itself in the directory, signed; a hint until its handlers answer."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from protocols.fields import Invite, Name, Number, NumberOrNone, RoundNumber, StageNumber

NAME_CHARACTERS = 64
"""As long as the peer file's `name` may be."""

State = Annotated[str, Meta(max_length=16, pattern=r"^[a-z]*\Z")]
"""connecting, joining, training, serving (without a stage), held (the run's owner paused the run), ended
(likewise), paused, leaving, or a word of a newer version; empty: it does not say."""
Device = Annotated[str, Meta(max_length=16, pattern=r"^[a-z]*\Z")]
"""cpu, cuda, or a word of a newer version; empty: it does not say."""
Loss = Annotated[float, Meta(ge=0.0, le=1e6)]
ExpertGroup = Annotated[int, Meta(ge=-1, lt=256)]
TOLD_GROUPS = 64
"""Groups of experts in a record: five bytes each at most."""

NO_STAGE = -1
"""Where peers that hold none announce themselves: observers, archivists, and who is paused, whose group
counts it no longer and whom nobody dials. One of a run that the owner has paused keeps its stage."""


class PeerRecord(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="peer"):
    """All of it are claims: nobody else has counted. Counts begin anew when the peer starts or moves."""

    peer: Name
    stage: StageNumber
    """-1: holds none."""
    role: str
    addresses: list[str]
    """Multiaddrs without the /p2p/ part."""
    round: RoundNumber
    tokens_per_second: float
    """What its computer could do, not what it was given to do."""
    version: str
    moving_to: StageNumber = -1
    """As in Beat."""
    name: str = ""
    """For people, chosen by the peer's owner; at most NAME_CHARACTERS, all of them printable."""
    state: State = ""
    loss: Loss | None = None
    """Mean of the newest microbatches whose loss passed there, nats per token; an observer's is of text that
    the run is not trained on."""
    tokens: Number = 0
    """Whose gradients it has committed since it started."""
    settled: RoundNumber = -1
    """Newest settled round."""
    checkpoint_round: RoundNumber = -1
    """Of the newest checkpoint on its disk; -1: none."""
    checkpoint_seconds: float = 0.0
    """When that was written, seconds since 1970."""
    sent_bytes: Number = 0
    received_bytes: Number = 0
    started: Number = 0
    """When the peer's process started, microseconds of the swarm's time since 1970; 0: it does not say. Two
    living processes of one identity are known by it (swarmnet/membership/own_start.py)."""
    invite: Invite = b""
    """What the peer shows of its invite (invites.py), where the run takes peers by invite. From here on, what
    is as it is by default at the end does not travel."""
    settled_tokens: NumberOrNone = -1
    """In all settled rounds of the stage, by all peers, since the run began; -1: not known."""
    device: Device = ""
    """What it computes with."""
    joules: Number = 0
    """That its device has taken while these tokens were committed, as that has measured it; 0: it has not."""
    text_shards: Number = 0
    """Of the run's text that it has, where that is read in epochs; 0: it reads none, or not so."""
    text_shards_read: Number = 0
    """To their end, in all epochs: so many times `text_shards` is how often it has read the text."""
    up_bytes_per_second: Number = 0
    """Of its line: what it may send, or was measured to; 0: not known. It can only lower what
    `tokens_per_second` counts for."""
    down_bytes_per_second: Number = 0
    experts_group: ExpertGroup = -1
    """Group of experts that it trains; -1: all of the stage, or there are none."""
    experts_trained: Annotated[tuple[RoundNumber, ...], Meta(max_length=TOLD_GROUPS)] = ()
    """Of the first so many groups, the newest settled round in which their experts were trained; -1: in none
    that it has seen settle."""
