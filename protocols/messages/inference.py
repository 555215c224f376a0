"""Messages of inference: a visitor, a peer without a stage, asks peers of each stage for forward passes.

Their numbers and the rest of the table are in table.py and docs/wire.md.
"""

from __future__ import annotations

from typing import ClassVar

from protocols.fields import Message, Name, Nats, Number, Reason, RoundNumber, Seconds, StageNumber


class AskForward(Message, frozen=True, tag=50):
    """A visitor's request at one stage: forward only. Body: tokens as int32 [B, T] for stage 0, else hidden
    states [B, T, D] and, behind a narrow boundary, their tokens; then, on the last stage with `scores`,
    labels as int32 [B, T]."""

    kind: ClassVar[str] = "inference"
    priority: ClassVar[int] = 3
    body: ClassVar[bool] = True
    request: Number
    attempt: Number
    """Counts the visitor's tries of this request, so that answers to an old one are told apart."""
    stage: StageNumber
    round: RoundNumber
    """Of the snapshot whose weights are to compute; -1: the newest that is held."""
    path: Number
    """Stages on the request's path, all together: middle stages count for less where there are more of them
    than in training (swarmnet.run.path_rules.Rules.branch_scale)."""
    sequences: Number
    """B."""
    tokens: Number
    """T."""
    exact: bool
    """Hidden states travel as fp32 instead of the manifest's codec."""
    scores: bool
    """Wants the loss of the labels, not what comes next."""
    deadline_seconds: Seconds
    """How long the visitor waits from now on."""


class Forwarded(Message, frozen=True, tag=51):
    """The answer. Body: hidden states [B, T, D]; of the last stage the logits of each last token as
    fp32 [B, V], or nothing with `scores`."""

    kind: ClassVar[str] = "inference"
    priority: ClassVar[int] = 3
    body: ClassVar[bool] = True
    request: Number
    attempt: Number
    round: RoundNumber
    loss_sum: Nats
    """Nats, summed over all labels; 0 without `scores`."""


class Declined(Message, frozen=True, tag=52):
    """A request will not be done here; `code` is one of swarmnet/inference/machine.py."""

    request: Number
    attempt: Number
    code: Name
    reason: Reason
