"""Events that people are told as they happen: a line of text, also in the peer's event log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from peers.telemetry.events import Event


class Said(Event, frozen=True):
    """A line for people, in the log as it was said."""

    text: str


Topic = Literal[
    "archive", "archived", "behind", "bootstraps_found", "bootstraps_lost",
    "busy", "checkpoint", "checkpoint_failed", "checkpoint_unusable",
    "chunks_not_kept", "clock", "compiled", "compiles", "devices", "devices_lost", "directory_split",
    "directory_whole", "elsewhere", "ended", "experts", "found", "height_not_kept", "holder",
    "identity_shared", "joined", "kept",
    "lan", "line", "look_up_failed", "machine", "missing", "moves", "no_manifest", "no_text",
    "no_weights", "not_evaluated", "not_ready", "notsaved", "order", "order_not_kept", "order_unusable",
    "p2pd_ended", "p2pd_not_started", "pause_cut", "restored", "run", "set_aside", "slow_upload", "stage",
    "state", "swarm", "text", "text_left_out", "tokenizing", "trains", "turned_away", "unreachable",
    "weights",
]  # fmt: skip
"""What a line is about that has nothing but its text."""
Say = Callable[[Topic, str], None]
"""One line for people, and the event log."""


class Remark(Said, frozen=True):
    """What has no fields of its own."""

    topic: Topic

    @property
    def name(self) -> str:
        return self.topic

    @property
    def fields(self) -> dict[str, Any]:
        return {"text": self.text}


# One event is one paragraph.
# fmt: off
class Listening(Said, frozen=True):
    """An address at which the peer listens, at the end of its text; the number of p2pd's process."""
    p2pd: int | None = None

class Relayed(Said, frozen=True):
    """A relay leads to this peer, by these addresses."""
    relay: str
    addresses: Sequence[str]

class NotRelayed(Said, frozen=True):
    """It does not any more."""
    relay: str

class Reachable(Said, frozen=True):
    """How others reach this peer."""
    way: str

class Metrics(Said, frozen=True):
    """Where /metrics is."""
    url: str

class Page(Said, frozen=True):
    """Where an observer's page is."""
    url: str

class Text(Said, frozen=True):
    """What was read of the run's text, in files, documents and bytes, and what was left out."""
    files: int
    documents: int
    bytes: int
    left_out: int

class EpochRead(Said, frozen=True):
    """Every shard of the run's text that this peer has was read."""
    epoch: int
    shards: int

class Pausing(Said, frozen=True):
    """It will let go of its stage."""
    reason: str

class Paused(Said, frozen=True):
    """It holds no stage; so much memory is still in use."""
    bytes: int

class Resuming(Said, frozen=True):
    """A reason to pause is gone."""
    reason: str

class Evaluated(Said, frozen=True):
    """An observer's score, in nats per token and bits per byte, on so many bytes with that SHA-256."""
    loss: float
    bits_per_byte: float
    round: int
    bytes: int
    sha256: str
    window: int
    seconds: float

# fmt: on


SAID: dict[str, type[Event]] = {
    str(kind.__struct_config__.tag): kind for kind in Said.__subclasses__() if kind is not Remark
}
"""By name, which may be one of the noted, too: `order` is noted with its number, and said in words."""
