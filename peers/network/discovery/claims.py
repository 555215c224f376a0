"""The values that a peer of any role claims in its record."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from peers.telemetry.console import printable
from protocols.signed.peer_record import NAME_CHARACTERS, PeerRecord
from swarmnet.identifiers import PeerId
from swarmnet.resources.link_bandwidth import UNKNOWN, LinkBandwidth


@dataclass(frozen=True, slots=True)
class Claims:
    """The fields of a `PeerRecord` that change while a peer lives."""

    state: str
    name: str = ""
    role: str = "worker"
    round: int = 0
    tokens_per_second: float = 0.0
    moving_to: int = -1
    loss: float | None = None
    tokens: int = 0
    settled: int = -1
    checkpoint_round: int = -1
    checkpoint_seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    finalized_tokens: int | None = None
    device: str = ""
    joules: float = 0.0
    text_shards: int = 0
    text_shards_read: int = 0
    line: LinkBandwidth = UNKNOWN
    experts_group: int = -1
    experts_trained: tuple[int, ...] = ()
    uploads_seen: bytes = b""
    vote_weights: bytes = b""
    avoids: tuple[tuple[PeerId, int, int], ...] = ()
    receipts: tuple[bytes, ...] = ()


def plain_name(name: str) -> str:
    """Return a user's text in the form that records allow."""
    return printable(name)[:NAME_CHARACTERS]


def bandwidth_fields(line: LinkBandwidth) -> tuple[int, int]:
    """Return the bandwidth as (up, down) in bytes per second for a record; 0 if not known."""
    return int(line.up) if line.up < inf else 0, int(line.down) if line.down < inf else 0


def claimed_bandwidth(record: PeerRecord) -> LinkBandwidth:
    return LinkBandwidth(record.up_bytes_per_second or inf, record.down_bytes_per_second or inf)
