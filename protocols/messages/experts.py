"""Messages of runs whose experts are routed: tokens to the peers that hold them, and what comes of them.

`round` is None where a microbatch is trained on, which is computed with the weights of the moment. Else the
rows are of a visitor's text and go forward alone, as fp32, by the weights of that round's snapshot (-1: of
the newest).

Their numbers and the rest of the table are in table.py and docs/wire.md.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from protocols.fields import Message, Name, Number, Reason, RoundNumber, Seconds, StageNumber

MOST_OF_A_GROUP = 1024
"""Experts of a layer (swarmnet/run/manifest_check.py)."""


class AskExperts(Message, frozen=True, tag=90):
    """What do these experts say of their rows? Body: the rows as hidden states [S, D], one expert's after the
    other's; backward, behind them, the gradient of what was said of them."""

    kind: ClassVar[str] = "experts"
    priority: ClassVar[int] = 1
    body: ClassVar[bool] = True
    origin: Name
    counter: Number
    attempt: Number
    """Counts the sender's tries of this call."""
    layer: StageNumber
    backward: bool
    deadline_seconds: Seconds
    """How long the sender waits from now on."""
    counts: Annotated[tuple[Number, ...], Meta(max_length=MOST_OF_A_GROUP)]
    """Rows of each expert of the receiver's group."""
    round: RoundNumber | None = None


class ExpertsSay(Message, frozen=True, tag=91):
    """The answer. Body: [S, D], what they say; backward the gradient at the rows."""

    kind: ClassVar[str] = "experts"
    priority: ClassVar[int] = 1
    body: ClassVar[bool] = True
    origin: Name
    counter: Number
    attempt: Number
    layer: StageNumber
    backward: bool
    round: RoundNumber | None = None


class ExpertsDecline(Message, frozen=True, tag=92):
    """It will not be done here, or not now ("busy")."""

    origin: Name
    counter: Number
    attempt: Number
    layer: StageNumber
    backward: bool
    code: Name
    reason: Reason
    round: RoundNumber | None = None
