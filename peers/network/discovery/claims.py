"""What a peer says of itself in its record, of whatever role it is."""

from __future__ import annotations

from dataclasses import dataclass

from peers.telemetry.console import printable
from protocols.signed.peer_record import NAME_CHARACTERS


@dataclass(frozen=True, slots=True)
class Claims:
    """Fields of a PeerRecord that change while a peer lives."""

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
    settled_tokens: int | None = None
    device: str = ""
    joules: float = 0.0
    text_shards: int = 0
    text_shards_read: int = 0


def plain_name(name: str) -> str:
    """A person's word as records take it."""
    return printable(name)[:NAME_CHARACTERS]
