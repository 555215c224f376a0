"""The settings that one peer brings to a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from swarmnet.membership.own_start import OwnStart
from swarmnet.resources.link_bandwidth import UNKNOWN, LinkBandwidth


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that one peer brings to a run."""

    stage: int | None = None
    """Stage to serve; None for the one that needs a peer most."""
    reduces_only: bool = False
    """Whether this peer only reduces: it sums contributions of others, and trains on nothing."""
    in_flight: int = 4
    slots: int = 4
    checkpoint_seconds: float = 300.0
    drain_seconds: float = 20.0
    checkpoints: Path | None = None
    """Folder of checkpoints; None keeps nothing on disk."""
    orders: Path | None = None
    """File with the owner's newest order; None keeps none."""
    heard_orders: tuple[bytes, ...] = ()
    """The signed orders that the former worker of this process held, should that file not have them."""
    invite: bytes = b""
    """The owner's signed invite for this peer, where the run requires one."""
    archive: str = ""
    """URL of the archive to start from when no peer of the stage is there; empty for none."""
    start: Path | None = None
    """Folder of the model that the run starts from, if it is on this machine."""
    allow_reinit: bool = False
    """Whether to start from the seed even if the run is known to have progressed further."""
    receipts: Path | None = None
    """File of receipts; None keeps none on disk."""
    moves: bool = False
    """Whether this peer may move to a stage that needs it more (stage_moves.py)."""
    never: frozenset[int] = frozenset()
    """Stages that this peer cannot serve."""
    own_start: OwnStart = field(default_factory=OwnStart)
    """When this process started, to tell its records from those of another process."""
    moved: int = 0
    """Number of moves so far."""
    line: LinkBandwidth = UNKNOWN
    """Bandwidth of this machine's link; an unknown bandwidth is no limit."""
    version: str = ""
    name: str = ""
    """Display name."""
    export_hint: str = ""
    """The command that exports the model, shown at the end of the run."""
    joules: Callable[[], float] = lambda: 0.0
    """Returns the device's energy in joules since it began this stage; 0 if the device does not report it."""
