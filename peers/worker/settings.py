"""What one peer brings along, besides the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from swarmnet.membership.own_start import OwnStart
from swarmnet.resources.link_bandwidth import UNKNOWN, LinkBandwidth


@dataclass(frozen=True, slots=True)
class Settings:
    """What one peer brings along, besides the run."""

    stage: int | None = None
    """None: the one that needs a peer most."""
    in_flight: int = 4
    slots: int = 4
    checkpoint_seconds: float = 300.0
    drain_seconds: float = 20.0
    checkpoints: Path | None = None
    """Folder; None keeps nothing on disk."""
    orders: Path | None = None
    """File that keeps the owner's newest order; None keeps none."""
    invite: bytes = b""
    """The owner's word that this peer may take part, where the run asks for one."""
    archive: str = ""
    """Where to start from when nobody of the stage is there; empty: nowhere."""
    start: Path | None = None
    """The folder of the model that the run starts from, if it is on this machine."""
    allow_reinit: bool = False
    """Begins from the seed even where the run is known to have come farther."""
    receipts: Path | None = None
    """File; None keeps none on disk."""
    moves: bool = False
    """Leaves its stage for one that needs it more (stage_moves.py)."""
    never: frozenset[int] = frozenset()
    """Stages that it cannot serve."""
    own_start: OwnStart = field(default_factory=OwnStart)
    """Of the process."""
    moved: int = 0
    """How often it has done so."""
    line: LinkBandwidth = UNKNOWN
    """This machine's, for this peer; what is not known limits nothing."""
    version: str = ""
    name: str = ""
    """Shown to people."""
    export_hint: str = ""
    """Which command exports the model, for the end of the run."""
    joules: Callable[[], float] = lambda: 0.0
    """That its device has taken since it began this stage, as measured; 0: it does not tell."""
