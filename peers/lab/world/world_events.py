"""What a world writes between the lines of its peers: what was done to them, what stub stages saw."""

from __future__ import annotations

from collections.abc import Sequence

from peers.telemetry.event import Event


# One event is one paragraph.
# fmt: off
class Begun(Event, frozen=True, tag="started"):
    """A process of a peer begins."""
    stage: int | None
    keep_disk: bool

class Crashed(Event, frozen=True):
    """It was killed."""

class Frozen(Event, frozen=True):
    """It was stopped, and may be thawed."""

class Thawed(Event, frozen=True):
    """It goes on."""

class LeaveRequested(Event, frozen=True):
    """It was asked to end politely."""

class MoveRequested(Event, frozen=True):
    """It was ordered to hold another stage."""
    stage: int

class Noticed(Event, frozen=True, tag="said"):
    """A line for people, and what it is about."""
    what: str
    line: str

class Payload(Event, frozen=True):
    """A stub stage made a contribution."""
    round: int
    payload: bytes

class Returned(Event, frozen=True):
    """A stub stage took one back, or what it said of some shards."""
    round: int
    payload: bytes
    shards: Sequence[int] = ()

class Summed(Event, frozen=True):
    """A stub stage added slices up."""
    round: int
    payload: bytes

class StageLost(Event, frozen=True):
    """All who held a stage were killed, for good."""
    stage: int
    lives: Sequence[str]

class StageKilled(Event, frozen=True):
    """All who held a stage were killed, and will be back."""
    stage: int
    lives: Sequence[str]

class StageBack(Event, frozen=True):
    """They are; some have lost their disk."""
    stage: int
    names: Sequence[str]
    lost: Sequence[str]

class Injected(Event, frozen=True):
    """A fault was done."""
    fault: str

class FaultSkipped(Event, frozen=True):
    """A fault could not be done then."""
    fault: str

class Healed(Event, frozen=True):
    """A fault is over."""
    fault: str
