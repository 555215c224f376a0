"""The snapshot of a swarm that `swarmnet top`, the observer's page, its JSON and the metrics all read.

A worker makes one of what it knows itself (peers/worker/snapshot_of_worker.py). An observer and `top --run`
make one of the signed records in the directory (peers/observer/snapshot_of_records.py). `complete` adds what
follows from the rows, for both. A worker's travels as JSON over its control socket: it is bounded, and it is
checked before it is drawn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Generic, TypeVar

import msgspec

from peers.errors import UserError
from peers.telemetry.console import printable
from swarmnet.run.owner_orders import NO_ORDER, Order

MAX_PEERS = 4096
MAX_LOSSES = 512
MAX_EVENTS = 256
SHOWN_VERSIONS = 8
ROLES = ("worker", "bootstrap", "observer", "archivist", "other")
STATES = ("joining", "training", "serving", "paused_by_owner", "ended", "paused", "leaving", "other", "gone")
"""`joining` is also a peer that connects; `serving`: a peer without a stage; `gone`: it does not answer."""
IN_STEP = ("training", "paused_by_owner", "ended")
"""A peer of a run that its owner paused or ended has the weights and the rounds of its group as before."""
HOLDING = ("joining", *IN_STEP, "suspect", "known")
"""A peer in one of these states holds its stage or is about to."""
FASTEST = 16.0
"""As in swarmnet/placement/policy.py: no peer counts for more than this many times the median."""
_NO_STAGE = {"bootstrap": "a bootstrap", "observer": "an observer", "archivist": "an archivist"}


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One peer. None: not known from where the snapshot was made."""

    peer: str
    stage: int
    """-1: it holds none."""
    state: str
    name: str = ""
    role: str = "worker"
    round: int | None = None
    loss: float | None = None
    """Nats per token."""
    tokens: int = 0
    """Committed since it started."""
    tokens_per_second: float | None = None
    """What it trains now."""
    can_do: float | None = None
    """What its computer could do, in tokens per second."""
    sent_bytes: int | None = None
    received_bytes: int | None = None
    version: str = ""
    signed_at: float = 0.0
    """Of its newest record, Unix time in seconds; 0: it was not made of records."""
    answers: bool = True
    """False for a peer that is here by its records only."""
    here: bool = False
    """It is the peer that made the snapshot."""

    def fits(self, search: str) -> bool:
        """`search` is lower case: part of its id or name, its state, role, or `stage 3`."""
        words = (self.peer.lower(), self.name.lower(), self.state, self.role, f"stage {self.stage}")
        return any(search in word for word in words)


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage, by the rows of its peers."""

    stage: int
    layers: int
    peers: int
    """They hold it or are about to."""
    states: Mapping[str, int]
    tokens_per_second: float
    """What the computers that are here could do together, as they say."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Of the stage whose newest one is oldest: with it the whole model is on disks."""

    round: int
    at: float


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """A group of experts of one stage."""

    stage: int
    group: int
    first: int
    """Of its experts, by their numbers in each layer."""
    last: int
    holders: int
    """Peers that train it."""
    trained: int | None
    """The newest settled round in which it was; None: nobody knows."""
    settled: int | None
    """Newest settled round of the stage; None: nobody is there."""

    @property
    def stale_rounds(self) -> int | None:
        """Settled without it; None: not known."""
        if self.trained is None or self.settled is None:
            return None
        return max(0, self.settled - self.trained)


@dataclass(frozen=True, slots=True)
class Pause:
    """The order that holds the run."""

    since: float
    """When the owner signed it, seconds since 1970."""
    reason: str


@dataclass(frozen=True, slots=True)
class Ordered:
    """What the run's owner has ordered, as far as it was read."""

    order: Order = NO_ORDER
    asked_at: float = 0.0
    """When the directory last answered, seconds since 1970; 0: not yet."""
    pause: Pause | None = None
    """None: the run is not held, or what holds it was followed by other orders before anything was read: an
    order says what holds, and why the newest change was made, not since when the others hold."""

    @property
    def given_at(self) -> float | None:
        """When the owner signed the newest order, seconds since 1970; None: none was found."""
        return self.order.sequence / 1e6 if self.order.sequence else None

    @property
    def held(self) -> bool | None:
        """None: nobody knows yet."""
        return self.order.paused if self.asked_at else None


UNASKED = Ordered()


@dataclass(frozen=True, slots=True)
class Happened:
    """An event worth a line."""

    time: float
    """Unix time in seconds."""
    code: str
    text: str
    level: str = "info"
    """info, warning or error."""


@dataclass(frozen=True, slots=True)
class SwarmSnapshot:
    """All that is known at one moment. None: not known from where it was made."""

    source: str
    """Where it comes from, for people."""
    at: float
    """Unix time in seconds."""
    run: str = ""
    """Its name."""
    run_id: str = ""
    state: str = ""
    rows: tuple[PeerRow, ...] = ()
    """By stage, those who are here before those who are gone, who has done most first."""
    stages: tuple[StageRow, ...] = ()
    """Empty: not known."""
    states: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Role -> state -> peers."""
    versions: tuple[tuple[str, int], ...] = ()
    weakest: int | None = None
    """Where a newcomer would go; None while nobody is there, or a stage is stuck."""
    round: int | None = None
    settled: int | None = None
    """Of the own stage or the first one, as `finalized_tokens`."""
    lag: int | None = None
    """Rounds behind the newest that is known of the same stage: each stage has rounds of its own."""
    loss: float | None = None
    eval_loss: float | None = None
    """On held-out text, as observers that evaluate say; nats per token."""
    losses: tuple[float, ...] = ()
    """Oldest first."""
    tokens: int = 0
    """Since the peer started, or those that are there did."""
    finalized_tokens: int | None = None
    """In all settled rounds of the stage since the run began, by all peers."""
    tokens_per_second: float | None = None
    sent: Mapping[str, int] = field(default_factory=dict)
    """Bytes by kind."""
    received: Mapping[str, int] = field(default_factory=dict)
    sent_bytes_per_second: float | None = None
    received_bytes_per_second: float | None = None
    microbatches: Mapping[str, int] = field(default_factory=dict)
    """What became of them -> how many."""
    rounds: Mapping[str, int] = field(default_factory=dict)
    """How they ended -> how many."""
    contributions_decided: int = 0
    """Of the own ones, those of which it is known whether they count."""
    contributions_late: int = 0
    """Of these, those that came too late to count."""
    events: tuple[Happened, ...] = ()
    """Oldest first."""
    departures: Mapping[str, int] = field(default_factory=dict)
    """Code -> peers that have left."""
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
    checkpoint: Checkpoint | None = None
    contributors: tuple[tuple[str, str, int], ...] = ()
    """(peer, name, tokens)."""
    experts: tuple[ExpertGroup, ...] = ()
    """Where each peer trains one group of them."""
    ordered: Ordered = UNASKED
    left_out: int = 0
    """Peers for which there was no room."""
    walked_at: float = 0.0
    """When the whole directory was last read; 0: not yet."""
    bootstraps: Mapping[str, bool] = field(default_factory=dict)
    """Address -> whether it answers."""

    @property
    def peers(self) -> int:
        """Peers that are here, of any role and state."""
        return sum(row.state != "gone" for row in self.rows)


MAX_POINTS = 360
"""More than a page is wide in points that can be told apart."""
FIRST_STEP_SECONDS = 5.0

Point = TypeVar("Point")


@dataclass(slots=True)
class Curve(Generic[Point]):
    """Over any time in bounded memory: when it is full, every other point goes and the step doubles."""

    step_seconds: float = FIRST_STEP_SECONDS
    points: list[tuple[float, Point]] = field(default_factory=list)

    def add(self, now: float, point: Point) -> None:
        """Kept if the newest one is a step old."""
        if self.points and now < self.points[-1][0] + self.step_seconds:
            return
        self.points.append((now, point))
        if len(self.points) > MAX_POINTS:
            del self.points[1::2]
            self.step_seconds *= 2


def complete(known: SwarmSnapshot, layers: Sequence[int]) -> SwarmSnapshot:
    """Return `known` with all that follows from its rows. `layers`: of each stage of the run."""
    rows = tuple(sorted(known.rows, key=_order))
    return replace(
        known,
        rows=rows,
        stages=_stages(rows, layers),
        states=_states(rows),
        versions=_versions(rows),
        lag=_lag(rows) if known.lag is None else known.lag,
    )


def _order(row: PeerRow) -> tuple[int, bool, bool, float, str]:
    stage = row.stage if row.stage >= 0 else 1 << 15
    return stage, row.state == "gone", not row.here, -row.tokens, row.peer


def _stages(rows: Iterable[PeerRow], layers: Sequence[int]) -> tuple[StageRow, ...]:
    states: list[Counter[str]] = [Counter(dict.fromkeys(STATES, 0)) for _ in layers]
    speeds: list[list[float]] = [[] for _ in layers]
    for row in rows:
        if 0 <= row.stage < len(layers):
            states[row.stage][row.state] += 1
            if row.state in HOLDING:
                speeds[row.stage].append(row.can_do or 0.0)
    return tuple(
        StageRow(stage, layers[stage], len(speeds[stage]), dict(states[stage]), capped_sum(speeds[stage]))
        for stage in range(len(layers))
    )


def _states(rows: Iterable[PeerRow]) -> dict[str, dict[str, int]]:
    counts = Counter((row.role, row.state) for row in rows)
    return {role: {state: counts[role, state] for state in STATES} for role in ROLES}


def _versions(rows: Iterable[PeerRow]) -> tuple[tuple[str, int], ...]:
    """Of those that are here; the rarest are `other`."""
    counts = Counter(row.version for row in rows if row.state != "gone" and row.signed_at)
    shown = counts.most_common(SHOWN_VERSIONS)
    rest = counts.total() - sum(count for _, count in shown)
    return (*shown, ("other", rest)) if rest else tuple(shown)


def _lag(rows: Sequence[PeerRow]) -> int | None:
    """The most rounds that a peer in step is behind another of its stage."""
    steps = [(row.stage, row.round) for row in rows
             if row.round is not None and row.stage >= 0 and row.state in IN_STEP]  # fmt: skip
    newest: dict[int, int] = {}
    for stage, round in steps:
        newest[stage] = max(round, newest.get(stage, round))
    return max((newest[stage] - round for stage, round in steps), default=None)


def capped_sum(values: Iterable[float]) -> float:
    """Return a sum in which one liar counts for little."""
    positive = [value for value in values if value > 0]
    most = FASTEST * median(positive) if positive else 0.0
    return sum(min(value, most) for value in positive)


def plain_state(state: str) -> str:
    """Return what a record says, as one of STATES."""
    known = "joining" if state in ("connecting", "moving") else state
    return known if known in STATES and known != "gone" else "other"


def plain_version(version: str) -> str:
    return printable(version[:32])


def as_json(snapshot: SwarmSnapshot) -> dict[str, Any]:
    """Plain data."""
    plain: dict[str, Any] = msgspec.to_builtins(snapshot)
    return plain


def from_json(data: Mapping[str, Any]) -> SwarmSnapshot:
    """The snapshot in what a peer answered. UserError if it is none: the peer holds no stage, or is of
    another version."""
    try:
        snapshot = msgspec.convert(data, SwarmSnapshot)
    except msgspec.ValidationError as error:
        role = str(data.get("role"))
        if role in _NO_STAGE:
            raise UserError(_no_snapshot(role)) from None
        raise UserError(
            f"the peer's answer is no snapshot of a swarm ({error}); its version is another: swarmnet version"
        ) from None
    if max(
        len(snapshot.rows) // MAX_PEERS,
        len(snapshot.stages) // MAX_PEERS,
        len(snapshot.losses) // MAX_LOSSES,
        len(snapshot.events) // MAX_EVENTS,
    ):
        raise UserError("the peer's answer is longer than a snapshot of a swarm is")
    return snapshot


def _no_snapshot(role: str) -> str:
    return (
        f"this peer is {_NO_STAGE[role]}: it holds no stage, so `swarmnet top` cannot show it; "
        "to watch its run: swarmnet top --run RUN --bootstrap MULTIADDR"
    )
