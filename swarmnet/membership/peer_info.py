"""What a peer knows of another peer of its run."""

from __future__ import annotations

from dataclasses import dataclass

from swarmnet.identifiers import PeerId

HELPER_ROLE = "reducer"
"""The role of a *helper*: a peer of a group that sums the contributions of others, and makes none."""
GONE_FAILURES = 2
"""Failed dials after which other peers replace a peer among the neighbours. Its record outlives it."""


@dataclass(slots=True)
class PeerInfo:
    """What is known of another peer. `sequence` orders its records; `ready`: it takes part in training."""

    stage: int
    role: str
    addresses: tuple[str, ...]
    sequence: int
    record: bytes
    recorded_at: float
    heard_at: float = float("-inf")
    linked: bool = False
    ready: bool = False
    round: int = 0
    service_seconds: float = 0.0
    moving_to: int = -1
    """The stage to which it has announced to move; -1: none."""
    has_seen: int = -1
    """Sequence of the newest of this peer's heartbeats that it has seen."""
    failures: int = 0
    dial_at: float = 0.0
    dialing: bool = False
    wants_us: bool = False
    """True if it keeps its link to this peer."""
    unneeded_since: float = float("inf")
    reached: bool = False
    """True if it was linked at least once. A record alone, or a handshake by a key, is not enough."""
    met: bool = False
    """True if its DHT node has answered this peer's."""
    tellers: tuple[PeerId, ...] = ()
    """Some of the peers that sent its record."""
    outdated: int = -1
    """Sequence up to which it has revoked its records: its clock was ahead when it signed them."""
    invited: bool = False
    """True if the run requires invites and the owner's invite for it was seen."""
    met_at: float = float("-inf")
    """When its first record came."""
    upload: int = 0
    """Its upload in bytes per second, by its newest record; 0: unknown."""
    uploads_seen: bytes = b""
    """What it has measured of the uploads of others, by its newest record
    (swarmnet/rounds/upload_meter.py)."""
    started: int = 0
    """When its process started, by its newest record; 0: unknown."""
    name: str = ""
    """Its name for people, by its newest record; empty: none."""
    worked: bool = False
    """True if it has contributed, with weight, to a settled set of this group."""

    @property
    def stranger(self) -> bool:
        """True if only its record says where it is."""
        return not (self.reached or self.wants_us or self.met)

    @property
    def is_helper(self) -> bool:
        """True if it only reduces."""
        return self.role == HELPER_ROLE

    @property
    def present(self) -> bool:
        """True unless it is known to be gone."""
        return self.linked or self.failures < GONE_FAILURES
