"""Events that a simulated world adds to the peers' event logs: faults, and the work of stub stages."""

from __future__ import annotations

from collections.abc import Sequence

from peers.telemetry.event import Event


# One event is one paragraph.
# fmt: off
class Begun(Event, frozen=True, tag="started"):
    """A process of a peer started."""
    stage: int | None
    keep_disk: bool

class Crashed(Event, frozen=True):
    """The peer was killed."""

class Frozen(Event, frozen=True):
    """The peer was stopped, and may be continued."""

class Thawed(Event, frozen=True):
    """The peer continues."""

class LeaveRequested(Event, frozen=True):
    """The peer was asked to leave in order."""

class MoveRequested(Event, frozen=True):
    """The peer was ordered to move to another stage."""
    stage: int

class Noticed(Event, frozen=True, tag="said"):
    """The peer showed its user a message on a topic."""
    what: str
    line: str

class Payload(Event, frozen=True):
    """A stub stage made a contribution."""
    round: int
    payload: bytes

class Returned(Event, frozen=True):
    """A stub stage took a contribution back, or the slices of some shards."""
    round: int
    payload: bytes
    shards: Sequence[int] = ()

class Summed(Event, frozen=True):
    """A stub stage reduced slices to a result."""
    round: int
    payload: bytes

class StageLost(Event, frozen=True):
    """All peers of a stage were killed, and do not come back together."""
    stage: int
    lives: Sequence[str]

class StageKilled(Event, frozen=True):
    """All peers of a stage were killed, and will come back together."""
    stage: int
    lives: Sequence[str]

class StageBack(Event, frozen=True):
    """All peers of a stage came back; some have lost their disk."""
    stage: int
    names: Sequence[str]
    lost: Sequence[str]

class Injected(Event, frozen=True):
    """A fault was injected."""
    fault: str

class FaultSkipped(Event, frozen=True):
    """A fault was skipped because it could not be injected."""
    fault: str

class Healed(Event, frozen=True):
    """A fault was healed."""
    fault: str
