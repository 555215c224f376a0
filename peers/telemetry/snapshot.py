"""The state of a swarm at one moment, for `swarmnet top`, the observer's page, its JSON and the metrics.

A snapshot has one row for each peer. A worker makes it from its own knowledge
(peers/worker/watch/snapshot_of_worker.py). An observer and `top --run` make it from the signed records in the
directory (peers/stageless/observer/snapshot_of_records.py). `complete` adds what follows from the rows, for
both. A worker sends it as JSON over its control socket. Its size is bounded, and readers validate it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Generic, Literal, TypeVar

import msgspec

from peers.config.errors import UserError
from peers.telemetry.console import count_text, printable
from swarmnet.run.owner_orders import NO_ORDER, OwnerOrders
from swarmnet.run.progress import duration_text, percent, progress_text

MAX_PEERS = 4096
MAX_LOSSES = 512
MAX_EVENTS = 256
SHOWN_VERSIONS = 8
ROLES = ("worker", "reducer", "bootstrap", "observer", "archivist", "other")
STATES = ("joining", "training", "serving", "paused_by_owner", "ended", "paused", "leaving", "other", "gone")
"""`joining` includes peers that connect; `serving` is a peer without a stage; `gone` does not respond."""
IN_STEP = ("training", "paused_by_owner", "ended")
"""A peer of a run that its owner paused or ended still has the weights and rounds of its group."""
HOLDING = ("joining", *IN_STEP, "suspect", "known")
"""A peer in one of these states serves its stage or is about to."""
FASTEST = 16.0
"""No peer counts for more than this many times the median, as in swarmnet/placement/policy.py."""
_NO_STAGE = {"bootstrap": "a bootstrap", "observer": "an observer", "archivist": "an archivist"}


@dataclass(frozen=True, slots=True)
class AnswerVerdict:
    """What one peer says of the answers of another, which it avoided."""

    by: str
    """Peer id of the one that compared."""
    what: Literal["gradients", "hidden states"]
    """What it compared: the peer before compares gradients, that of the stage after hidden states."""
    differed: int
    """Number of comparisons in which they differed, of those `compared`."""
    compared: int


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One peer. None means that the snapshot's maker does not know the value."""

    peer: str
    stage: int
    """Index of its stage; -1 for none."""
    state: str
    name: str = ""
    role: str = "worker"
    round: int | None = None
    loss: float | None = None
    """Nats per token."""
    tokens: int = 0
    """Tokens committed since the peer started."""
    tokens_per_second: float | None = None
    """Current training speed."""
    can_do: float | None = None
    """Speed that its machine could reach, in tokens per second."""
    sent_bytes: int | None = None
    received_bytes: int | None = None
    version: str = ""
    signed_at: float = 0.0
    """Unix time in seconds of its newest record; 0 if the row was not made from records."""
    answers: bool = True
    """Whether the peer responds; False if only its records show it."""
    here: bool = False
    """Whether this peer made the snapshot."""
    vote_weight: float | None = None
    """What its votes weigh, 0 to 1, with `sync.weights: agreement`; None if unknown."""
    is_new_voter: bool = False
    """Whether its votes do not count because they are not known yet."""
    avoided_by: int = 0
    """Number of peers that avoided it because of its answers."""
    verdicts: tuple[AnswerVerdict, ...] = ()
    """Some of these, with reasons."""

    def fits(self, search: str) -> bool:
        """Return whether the row matches `search` (lower case): part of its id, name or state, its role, or
        `stage 3`."""
        words = (self.peer.lower(), self.name.lower(), self.state, self.role, f"stage {self.stage}")
        return any(search in word for word in words)


@dataclass(frozen=True, slots=True)
class StageRow:
    """One stage, as the sum of its peers' rows."""

    stage: int
    layers: int
    peers: int
    """Number of peers that serve it or are about to."""
    states: Mapping[str, int]
    tokens_per_second: float
    """Speed that all present machines could reach together, by their own claims."""
    is_seen: bool = True
    """Whether the peers of this stage are known here: a worker sees its own stage and the stages next to it,
    an observer sees all."""


@dataclass(frozen=True, slots=True)
class OldestCheckpoint:
    """The newest checkpoint of the stage whose newest is oldest: since then the model is on disks."""

    round: int
    at: float


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """A group of experts of one stage."""

    stage: int
    group: int
    first: int
    """Index of the first expert of the group in each layer."""
    last: int
    holders: int
    """Number of peers that train it."""
    trained: int | None
    """The newest settled round in which it was trained; None if unknown."""
    settled: int | None
    """The newest settled round of the stage; None if no peer is there."""

    @property
    def stale_rounds(self) -> int | None:
        """Rounds settled since it was last trained; None if unknown."""
        if self.trained is None or self.settled is None:
            return None
        return max(0, self.settled - self.trained)


@dataclass(frozen=True, slots=True)
class Pause:
    """The order that pauses the run."""

    since: float
    """Unix time at which the owner signed it."""
    reason: str


@dataclass(frozen=True, slots=True)
class OwnerOrdersView:
    """The owner's orders, as far as they were read."""

    order: OwnerOrders = NO_ORDER
    asked_at: float = 0.0
    """Unix time at which the directory last responded; 0 for never."""
    pause: Pause | None = None
    """The current pause. None if the run is not paused, or if other orders followed the pause before any was
    read. An order contains only the reason of the newest change."""

    @property
    def given_at(self) -> float | None:
        """Unix time at which the owner signed the newest order; None if none was found."""
        return self.order.sequence / 1e6 if self.order.sequence else None

    @property
    def held(self) -> bool | None:
        """Whether the run is paused; None if unknown."""
        return self.order.paused if self.asked_at else None


ORDERS_NOT_READ = OwnerOrdersView()


@dataclass(frozen=True, slots=True)
class ShownEvent:
    """An event that is shown to people."""

    time: float
    """Unix time in seconds."""
    code: str
    text: str
    level: str = "info"
    """info, warning or error."""


@dataclass(frozen=True, slots=True)
class OwnWork:
    """What this computer has contributed to the run in its whole life. Only settled contributions count."""

    tokens: int
    seconds: float
    """Time in which it trained."""
    share: float | None = None
    """Its part of the tokens of its stage, 0 to 1; None if unknown."""
    stage: int | None = None
    """The stage of `share`; None in a run of one stage."""
    joules: float = 0.0
    """Energy of its GPU while it trained; 0 if the GPU does not report it."""

    def text(self) -> str:
        """Return one sentence for people."""
        whole = "the run" if self.stage is None else f"stage {self.stage}'s tokens"
        share = f" ({percent(self.share)} of {whole})" if self.share else ""
        energy = f", with {self.joules / JOULES_PER_KWH:.2f} kWh" if self.joules else ""
        trained = f"This computer has trained {count_text(self.tokens)} tokens"
        return f"{trained} in {duration_text(self.seconds)}{share}{energy}."


JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True, slots=True)
class Obstacle:
    """What keeps the run, or one peer, from training."""

    where: str
    """The stage or the peer."""
    why: str
    help: str
    """What a person can do about it, with the command; empty if nothing is known to help."""
    stops_run: bool = True
    """Whether nothing is trained because of it; False if it only concerns one peer."""


@dataclass(frozen=True, slots=True)
class SwarmSnapshot:
    """The state of a swarm at one moment. None means that the snapshot's maker does not know the value."""

    source: str
    """The source of the data, for people."""
    at: float
    """Unix time in seconds."""
    run: str = ""
    """Name of the run."""
    run_id: str = ""
    state: str = ""
    rows: tuple[PeerRow, ...] = ()
    """Sorted by stage, present peers before gone ones, most tokens first."""
    stages: tuple[StageRow, ...] = ()
    """Empty if unknown."""
    states: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Role -> state -> number of peers."""
    versions: tuple[tuple[str, int], ...] = ()
    weakest: int | None = None
    """Stage that a newcomer would choose; None while no peer is there or a stage is stuck."""
    round: int | None = None
    settled: int | None = None
    """Newest settled round of this peer's stage or of the first stage, like `finalized_tokens`."""
    planned: int | None = None
    """Number of rounds that the run is planned to have (swarmnet/run/progress.py)."""
    seconds_left: float | None = None
    """Seconds until the planned rounds are done, at the present pace; None if unknown or done."""
    lag: int | None = None
    """Rounds behind the newest known round of the same stage; each stage counts its own rounds."""
    loss: float | None = None
    eval_loss: float | None = None
    """Loss on held-out text in nats per token, as reported by evaluating observers."""
    losses: tuple[float, ...] = ()
    """Oldest first."""
    tokens: int = 0
    """Tokens committed since the peer, or each present peer, started."""
    finalized_tokens: int | None = None
    """Tokens of all peers in all settled rounds of the stage."""
    tokens_per_second: float | None = None
    sent: Mapping[str, int] = field(default_factory=dict)
    """Bytes by kind."""
    received: Mapping[str, int] = field(default_factory=dict)
    sent_bytes_per_second: float | None = None
    received_bytes_per_second: float | None = None
    microbatches: Mapping[str, int] = field(default_factory=dict)
    """Number of microbatches by outcome."""
    rounds: Mapping[str, int] = field(default_factory=dict)
    """Number of rounds by outcome."""
    comparisons: Mapping[str, int] = field(default_factory=dict)
    """Number of microbatches whose answer was compared with that of a second peer, by outcome."""
    not_compared: int | None = None
    """The next stage, if it has one peer, whose answers cannot be compared with another's."""
    contributions_decided: int = 0
    """Own contributions of which it is known whether they count."""
    contributions_late: int = 0
    """Own contributions that came too late to count."""
    own_work: OwnWork | None = None
    """What this computer has contributed; None for a snapshot of the swarm."""
    events: tuple[ShownEvent, ...] = ()
    """Oldest first."""
    departures: Mapping[str, int] = field(default_factory=dict)
    """Departure code -> number of departures since the observer started."""
    away: Mapping[str, int] = field(default_factory=dict)
    """Departure code -> number of peers that left and have not come back."""
    idle_share: float | None = None
    """Fraction of the last seconds without compute, 0 to 1."""
    utilization: float | None = None
    """Fraction of the device's peak over the last seconds, 0 to 1."""
    memory_bytes: int | None = None
    """Resident memory of the peer's process, as in /metrics; p2pd is not included."""
    gradient_norm: float | None = None
    """Norm of its newest contribution's gradient before clipping."""
    waits_for: tuple[int, ...] = ()
    """Stages without a peer for which microbatches wait."""
    warnings: tuple[str, ...] = ()
    """Problems that keep the run or this peer's work from counting, each with the command that helps."""
    checkpoint: OldestCheckpoint | None = None
    obstacles: tuple[Obstacle, ...] = ()
    """What keeps the run or single peers from training; for a snapshot of records."""
    contributors: tuple[tuple[str, str, int, int, float], ...] = ()
    """Tuples of peer, name, contributions confirmed by receipts, claimed tokens and seconds of training; most
    confirmed contributions first."""
    doubts: tuple[str, ...] = ()
    """What others' records say against peers: one sentence for each peer or stage."""
    weight_conflicts: Mapping[int, int] = field(default_factory=dict)
    """Stage -> number of peers that report other weights of votes than most, for the same round."""
    experts: tuple[ExpertGroup, ...] = ()
    """Groups of experts, where each peer trains one group."""
    ordered: OwnerOrdersView = ORDERS_NOT_READ
    left_out: int = 0
    """Number of peers that were left out because the limit was reached."""
    walked_at: float = 0.0
    """Unix time at which the whole directory was last read; 0 for never."""
    bootstraps: Mapping[str, bool] = field(default_factory=dict)
    """Address -> whether the bootstrap responds."""

    @property
    def peers(self) -> int:
        """Number of present workers, of any state."""
        return sum(row.state != "gone" and row.role == "worker" for row in self.rows)

    @property
    def progress(self) -> str:
        """How far the run is, for people; empty if unknown."""
        if self.round is None or self.planned is None:
            return f"round {self.round}" if self.round is not None else ""
        return progress_text(self.round, self.planned, self.seconds_left)

    @property
    def others(self) -> dict[str, int]:
        """Role -> number of present peers that are no workers. Known bootstraps count if they respond, since
        they have a record only while no peer trains."""
        present = Counter(row.role for row in self.rows if row.state != "gone" and row.role != "worker")
        if self.bootstraps:
            present["bootstrap"] = sum(self.bootstraps.values())
        return {role: present[role] for role in ROLES if present[role]}


MAX_POINTS = 360
"""More points than a page can show apart."""
FIRST_STEP_SECONDS = 5.0

Point = TypeVar("Point")


@dataclass(slots=True)
class Curve(Generic[Point]):
    """A curve over any time in bounded memory: when full, every other point goes and the step doubles."""

    step_seconds: float = FIRST_STEP_SECONDS
    points: list[tuple[float, Point]] = field(default_factory=list)

    def add(self, now: float, point: Point) -> bool:
        """Add a point if the newest one is at least a step old. Return whether it was added."""
        if self.points:
            newest_time, _ = self.points[-1]
            if now < newest_time + self.step_seconds:
                return False
        self.points.append((now, point))
        if len(self.points) > MAX_POINTS:
            del self.points[1::2]  # Every other point.
            self.step_seconds *= 2
        return True


def complete(known: SwarmSnapshot, layers: Sequence[int]) -> SwarmSnapshot:
    """Return `known` with sorted rows and the values that follow from them: stages, states, versions, lag.
    `layers` is the number of layers of each stage."""
    rows = tuple(sorted(known.rows, key=_row_sort_key))
    return replace(
        known,
        rows=rows,
        stages=_stage_rows(rows, layers, known.waits_for),
        states=_count_states(rows),
        versions=_count_versions(rows),
        lag=_largest_lag(rows) if known.lag is None else known.lag,
    )


def _row_sort_key(row: PeerRow) -> tuple[int, bool, bool, float, str]:
    stage = row.stage if row.stage >= 0 else 1 << 15
    return stage, row.state == "gone", not row.here, -row.tokens, row.peer


def _stage_rows(
    rows: Iterable[PeerRow], layers: Sequence[int], without_peers: Sequence[int]
) -> tuple[StageRow, ...]:
    """Return one row for each stage with its peers by state and their total possible speed. `layers` has the
    number of layers of each stage; stages `without_peers` are known to have none. Peers in a state of HOLDING
    serve the stage or are about to."""
    states: list[Counter[str]] = [Counter(dict.fromkeys(STATES, 0)) for _ in layers]
    speeds: list[list[float]] = [[] for _ in layers]
    near = range(len(layers))
    for row in rows:
        if row.here and row.stage >= 0:
            near = range(row.stage - 1, row.stage + 2)
        if 0 <= row.stage < len(layers):
            states[row.stage][row.state] += 1
            if row.state in HOLDING:
                speeds[row.stage].append(row.can_do or 0.0)
    return tuple(
        StageRow(
            stage=stage,
            layers=layers[stage],
            peers=len(speeds[stage]),
            states=dict(states[stage]),
            tokens_per_second=capped_sum(speeds[stage]),
            is_seen=stage in near or stage in without_peers or bool(speeds[stage]),
        )
        for stage in range(len(layers))
    )


def _count_states(rows: Iterable[PeerRow]) -> dict[str, dict[str, int]]:
    """Return role -> state -> number of peers, with every role and state."""
    counts = Counter((row.role, row.state) for row in rows)
    return {role: {state: counts[role, state] for state in STATES} for role in ROLES}


def _count_versions(rows: Iterable[PeerRow]) -> tuple[tuple[str, int], ...]:
    """Return versions of present peers with their counts; the rarest are `other`."""
    counts = Counter(row.version for row in rows if row.state != "gone" and row.signed_at)
    shown = counts.most_common(SHOWN_VERSIONS)
    rest = counts.total() - sum(count for _, count in shown)
    return (*shown, ("other", rest)) if rest else tuple(shown)


def _largest_lag(rows: Sequence[PeerRow]) -> int | None:
    """Return the largest number of rounds that a peer is behind the furthest peer of its stage. Only peers
    that follow their group's rounds (states IN_STEP) count; None without any."""
    stage_rounds = [
        (row.stage, row.round)
        for row in rows
        if row.round is not None and row.stage >= 0 and row.state in IN_STEP
    ]
    newest: dict[int, int] = {}
    for stage, round in stage_rounds:
        newest[stage] = max(round, newest.get(stage, round))
    return max((newest[stage] - round for stage, round in stage_rounds), default=None)


def capped_sum(values: Iterable[float]) -> float:
    """Return a sum in which a single false claim counts for little."""
    positive = [value for value in values if value > 0]
    cap = FASTEST * median(positive) if positive else 0.0
    return sum(min(value, cap) for value in positive)


def plain_state(state: str) -> str:
    """Return a record's state as one of STATES."""
    known = "joining" if state in ("connecting", "moving") else state
    return known if known in STATES and known != "gone" else "other"


def plain_version(version: str) -> str:
    return printable(version[:32])


def as_json(snapshot: SwarmSnapshot) -> dict[str, Any]:
    """Return the snapshot as plain data."""
    plain: dict[str, Any] = msgspec.to_builtins(snapshot)
    return plain


def from_json(data: Mapping[str, Any]) -> SwarmSnapshot:
    """Return the snapshot from a peer's response. Raises UserError if the response is no snapshot (the peer
    has no stage or another version) or is too long."""
    try:
        snapshot = msgspec.convert(data, SwarmSnapshot)
    except msgspec.ValidationError as error:
        role = str(data.get("role"))
        if role in _NO_STAGE:
            raise UserError(_no_snapshot(role)) from None
        raise UserError(
            f"the peer's response is no snapshot of a swarm ({error}); its version differs: swarmnet version"
        ) from None
    if (
        len(snapshot.rows) >= MAX_PEERS
        or len(snapshot.stages) >= MAX_PEERS
        or len(snapshot.losses) >= MAX_LOSSES
        or len(snapshot.events) >= MAX_EVENTS
    ):
        raise UserError("the peer's response is longer than a snapshot of a swarm may be")
    return snapshot


def _no_snapshot(role: str) -> str:
    return (
        f"this peer is {_NO_STAGE[role]}: it serves no stage, so `swarmnet top` cannot show it; "
        "to watch its run: swarmnet top --run RUN --bootstrap MULTIADDR"
    )
