"""What `swarmnet top` shows, whoever made it: a running peer, a look into the directory, or event logs.

It travels as JSON over a peer's control socket, so it is bounded and checked before it is drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from peers.errors import UserError

MOST_PEERS = 4096
MOST_LOSSES = 512
MOST_EVENTS = 256
_NO_STAGE = {"bootstrap": "a bootstrap", "observer": "an observer", "archivist": "an archivist"}


@dataclass(frozen=True, slots=True)
class PeerSeen:
    """One peer. None: not known from where the picture was made."""

    peer: str
    stage: int
    state: str
    name: str = ""
    round: int | None = None
    loss: float | None = None
    """Nats per token."""
    tokens_per_second: float | None = None
    """What it trains now."""
    can_do: float | None = None
    """What its computer could do, in tokens per second."""
    sent_bytes: int | None = None
    received_bytes: int | None = None
    here: bool = False
    """It is the peer that made the picture."""


@dataclass(frozen=True, slots=True)
class Happened:
    """An event worth a line."""

    time: float
    """Unix time in seconds."""
    code: str
    text: str
    level: str = "info"
    """info, warning or error."""
    who: str = ""
    """Whose event log says so, where there are several."""


@dataclass(frozen=True, slots=True)
class Picture:
    """All that is drawn."""

    source: str
    """Where it comes from, for people."""
    time: float
    """Unix time in seconds."""
    run: str = ""
    state: str = ""
    stages: int = 0
    """0: not known."""
    peers: tuple[PeerSeen, ...] = ()
    round: int | None = None
    settled: int | None = None
    lag: int | None = None
    """Rounds behind the newest that is known of the same stage: each stage has rounds of its own."""
    loss: float | None = None
    eval_loss: float | None = None
    """On held-out text, by the newest word of an observer that evaluates; nats per token."""
    losses: tuple[float, ...] = ()
    """Oldest first."""
    tokens: int = 0
    """Since the peer started, or those that are there did."""
    settled_tokens: int | None = None
    """In all settled rounds of the stage, by all peers; None: not known."""
    tokens_per_second: float | None = None
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes by kind."""
    received: dict[str, int] = field(default_factory=dict)
    microbatches: dict[str, int] = field(default_factory=dict)
    """What became of them -> how many."""
    rounds: dict[str, int] = field(default_factory=dict)
    """How they ended -> how many."""
    events: tuple[Happened, ...] = ()
    """Oldest first."""
    idle_share: float | None = None
    """Of the last seconds, how much of the time it had nothing to compute, 0 to 1."""
    utilization: float | None = None
    """Of the operations that its device can do at most, 0 to 1, over the last seconds."""
    memory_bytes: int | None = None
    """Of the peer's process, resident, as /metrics has it: p2pd beside it is not in it."""
    gradient_norm: float | None = None
    """Of its newest contribution, before it was clipped."""
    waits_for: tuple[int, ...] = ()
    """Stages without a peer, for which microbatches wait."""
    warnings: tuple[str, ...] = ()
    """What keeps the run or this peer's work from counting, a sentence each, with what a person can type: of
    stages whose peers all wait for weights, and of an upload that is too slow."""


def lag_of(steps: Iterable[tuple[int, int]]) -> int | None:
    """The most rounds that a peer is behind another of its stage, by the stages and rounds of all."""
    newest: dict[int, int] = {}
    steps = list(steps)
    for stage, round in steps:
        newest[stage] = max(round, newest.get(stage, round))
    return max((newest[stage] - round for stage, round in steps), default=None)


def as_json(picture: Picture) -> dict[str, Any]:
    """Plain data."""
    plain: dict[str, Any] = msgspec.to_builtins(picture)
    return plain


def from_json(data: Mapping[str, Any]) -> Picture:
    """The picture in what a peer answered. UserError if it is none: the peer holds no stage, or
    is of another version."""
    try:
        picture = msgspec.convert(data, Picture)
    except msgspec.ValidationError as error:
        role = str(data.get("role"))
        if role in _NO_STAGE:
            raise UserError(_no_picture(role)) from None
        raise UserError(
            f"the peer's answer is no picture of a swarm ({error}); its version is another: swarmnet version"
        ) from None
    if max(
        len(picture.peers) // MOST_PEERS,
        len(picture.losses) // MOST_LOSSES,
        len(picture.events) // MOST_EVENTS,
    ):
        raise UserError("the peer's answer is longer than a picture of a swarm is")
    return picture


def _no_picture(role: str) -> str:
    return (
        f"this peer is {_NO_STAGE[role]}: it holds no stage, so it has no picture; "
        "to watch its run: swarmnet top --run RUN --bootstrap MULTIADDR"
    )


def summed(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """By key."""
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)


def curve(points: Iterable[tuple[float, float]], bins: int = 120) -> tuple[float, ...]:
    """Means of (time, value) in equal parts of the time; parts without a point are left out."""
    ordered: Sequence[tuple[float, float]] = sorted(points)
    if not ordered:
        return ()
    first, last = ordered[0][0], ordered[-1][0]
    width = (last - first) / bins or 1.0
    sums: dict[int, tuple[float, int]] = {}
    for at, value in ordered:
        index = min(bins - 1, int((at - first) / width))
        total, count = sums.get(index, (0.0, 0))
        sums[index] = (total + value, count + 1)
    return tuple(total / count for _, (total, count) in sorted(sums.items()))
