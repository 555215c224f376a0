"""The swarm as a page shows it, drawn from what an observer knows. All counts are claims of peers' records.

Where one number stands for the swarm it is a median, or a sum in which nobody counts for more than 16 times
the usual peer or for more than all rounds can hold: one liar does not spoil it, a majority does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

from peers.config.run_file import SignedManifest
from peers.network.discovery.claims import line_of
from peers.network.discovery.expert_groups import ExpertGroup, expert_groups
from peers.network.discovery.record_reader import (
    IN_STEP,
    eval_loss,
    settled_round,
    settled_tokens,
    stuck_of,
    usual_loss,
    usual_round,
    waits_for_weights,
)
from peers.observer.owner_orders import UNASKED, Ordered
from peers.observer.sightings import Departure, Sighting, Sightings
from peers.telemetry.console import printable
from peers.telemetry.reasons import stuck_lines
from protocols.signed.peer_record import PeerRecord
from swarmnet.identifiers import PeerId
from swarmnet.placement import policy
from swarmnet.run.manifest import Span

ROLES = ("worker", "bootstrap", "observer", "archivist", "other")
STATES = ("joining", "training", "serving", "held", "ended", "paused", "leaving", "other", "gone")
"""`joining` is also who connects; `serving`: a peer without a stage; `gone`: still in the directory, but it
does not answer."""
HOLDING = ("joining", *IN_STEP)
"""Who holds a stage or is about to."""
SHOWN_VERSIONS = 8
MOST_CONTRIBUTORS = 20
SHOWN_DEPARTURES = 20
FASTEST = 16.0
"""As in swarmnet/placement/policy.py: nobody counts for more than this many times the median."""


@dataclass(frozen=True, slots=True)
class Row:
    """One peer."""

    peer: str
    name: str
    role: str
    stage: int
    state: str
    round: int
    loss: float | None
    tokens: int
    tokens_per_second: float
    version: str
    signed_at: float
    answers: bool
    """False for a peer that is here by its records only."""

    def fits(self, search: str) -> bool:
        """`search` is lower case: part of its id or name, its state, role, or `stage 3`."""
        words = (self.peer.lower(), self.name.lower(), self.state, self.role, f"stage {self.stage}")
        return any(search in word for word in words)


@dataclass(frozen=True, slots=True)
class Stage:
    stage: int
    layers: int
    states: Mapping[str, int]
    tokens_per_second: float
    """What the computers that are here could do together, as they say."""

    @property
    def peers(self) -> int:
        """That hold it or are about to."""
        return sum(self.states[state] for state in HOLDING)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Of the stage whose newest one is oldest: with it the whole model is on disks."""

    round: int
    at: float


@dataclass(frozen=True, slots=True)
class Picture:
    """At one moment. Times are seconds since 1970."""

    at: float
    rows: tuple[Row, ...] = ()
    """By stage, those who are here before those who are gone, who has done most first."""
    stages: tuple[Stage, ...] = ()
    weakest: int | None = None
    """Where a newcomer would go; None while nobody is there, or a stage is stuck."""
    stuck: tuple[str, ...] = ()
    """A sentence about each stage whose peers all wait for weights."""
    states: Mapping[tuple[str, str], int] | None = None
    """(role, state) -> peers."""
    round: int | None = None
    settled: int | None = None
    """Of the first stage, as `settled_tokens`."""
    loss: float | None = None
    eval_loss: float | None = None
    """On held-out text, as observers that evaluate say; nats per token."""
    tokens: int = 0
    """Committed since their starts, over those that this observer has seen."""
    settled_tokens: int | None = None
    """In all settled rounds of the first stage since the run began, which every token visits; None: not
    known."""
    tokens_per_second: float = 0.0
    sent_bytes_per_second: float = 0.0
    received_bytes_per_second: float = 0.0
    checkpoint: Checkpoint | None = None
    versions: tuple[tuple[str, int], ...] = ()
    contributors: tuple[tuple[str, str, int], ...] = ()
    """(peer, name, tokens)."""
    departures: tuple[tuple[str, int], ...] = ()
    recent: tuple[Departure, ...] = ()
    left_out: int = 0
    ordered: Ordered = UNASKED
    """By the run's owner."""
    experts: tuple[ExpertGroup, ...] = ()
    """Where each peer trains one group of them."""

    @property
    def peers(self) -> int:
        """That are here, of any role and state."""
        return sum(row.state != "gone" for row in self.rows)


def draw(
    sightings: Sightings, signed: SignedManifest, now: float, ordered: Ordered = UNASKED, *,
    own_eval_loss: float | None = None,
) -> Picture:  # fmt: skip
    """`own_eval_loss`: of this observer's newest score; its own record is not among the sightings."""
    manifest = signed.manifest
    here = list(sightings.here())
    training = [known.record for known in here if state_of(known) in IN_STEP and known.record.stage >= 0]
    current = usual_round(training)
    most = 2 * ((current or 0) + 2) * manifest.rounds.target_tokens  # Rounds overshoot, by less than that.
    contributions, stages = sightings.contributions, range(len(manifest.stages))
    flow = [_capped_sum(known.tokens_per_second for known in here if known.record.stage == s) for s in stages]
    states = Counter((_role(known), state_of(known)) for known in sightings.peers.values())
    holding = (known.record for known in here if state_of(known) in HOLDING)
    stuck = stuck_of(holding, manifest.rounds.snapshot_rounds)
    return Picture(
        at=now,
        rows=tuple(sorted((_row(known) for known in sightings.peers.values()), key=_order)),
        stages=tuple(_stage(s, _layers(manifest.span(s)), sightings.peers.values()) for s in stages),
        weakest=_weakest(here, signed, now) if not stuck else None,
        stuck=stuck_lines(stuck, signed.run_id),
        states={(role, state): states[role, state] for role in ROLES for state in STATES},
        round=current,
        settled=settled_round(training, 0),
        loss=usual_loss(training),
        eval_loss=eval_loss((known.record for known in here), own_eval_loss),
        settled_tokens=settled_tokens(training, 0),
        tokens=max(contributions.of_stage(stage, most) for stage in stages),
        tokens_per_second=max(flow),
        sent_bytes_per_second=_capped_sum(known.sent_bytes_per_second for known in here),
        received_bytes_per_second=_capped_sum(known.received_bytes_per_second for known in here),
        checkpoint=_checkpoint(sightings.peers.values(), len(stages), now),
        versions=_versions(here),
        contributors=tuple(contributions.largest(MOST_CONTRIBUTORS, most)),
        departures=tuple(sightings.departures.most_common()),
        recent=tuple(list(sightings.recent)[: -SHOWN_DEPARTURES - 1 : -1]),
        left_out=sightings.left_out,
        ordered=ordered,
        experts=tuple(expert_groups(manifest, (known.record for known in here))),
    )


def state_of(known: Sighting) -> str:
    if known.gone:
        return "gone"
    state = "joining" if known.record.state in ("connecting", "moving") else known.record.state
    return state if state in STATES and state != "gone" else "other"


def _role(known: Sighting) -> str:
    return known.record.role if known.record.role in ROLES else "other"


def _row(known: Sighting) -> Row:
    record = known.record
    return Row(
        record.peer, record.name, _role(known), record.stage, state_of(known), record.round, record.loss,
        record.tokens, known.tokens_per_second, _version(record), known.signed_at, known.answers,
    )  # fmt: skip


def _version(record: PeerRecord) -> str:
    return printable(record.version[:32])


def _order(row: Row) -> tuple[int, bool, float, str]:
    stage = row.stage if row.stage >= 0 else 1 << 15
    return stage, row.state == "gone", -row.tokens, row.peer


def _stage(stage: int, layers: int, peers: Iterable[Sighting]) -> Stage:
    held = [known for known in peers if known.record.stage == stage]
    states = Counter(state_of(known) for known in held)
    speed = _capped_sum(known.record.tokens_per_second for known in held if state_of(known) in HOLDING)
    return Stage(stage, layers, {state: states[state] for state in STATES}, speed)


def _layers(span: Span) -> int:
    return span.stop - span.first


def _capped_sum(values: Iterable[float]) -> float:
    positive = [value for value in values if value > 0]
    most = FASTEST * median(positive) if positive else 0.0
    return sum(min(value, most) for value in positive)


def _weakest(here: Sequence[Sighting], signed: SignedManifest, now: float) -> int | None:
    """By the rule that newcomers go by."""
    data = signed.manifest.data
    tokens = data.sequence_tokens * data.microbatch_sequences
    seen = []
    for known in here:
        if state_of(known) in HOLDING:
            record, age = known.record, max(0.0, now - known.signed_at)
            rate = record.tokens_per_second / tokens
            line = line_of(record)
            waits = waits_for_weights(record)
            counted = policy.Seen(record.stage, rate, record.moving_to, age, record.round, line, waits)
            seen.append((PeerId(record.peer), counted))
    if not seen:
        return None
    rules = policy.move_rules(signed.manifest)
    return policy.choose_stage(policy.view_of(seen, rules), rules, Random(0))


def _checkpoint(peers: Iterable[Sighting], stages: int, now: float) -> Checkpoint | None:
    newest: dict[int, Checkpoint] = {}
    for known in peers:
        record = known.record
        if record.checkpoint_round < 0:
            continue
        found = Checkpoint(record.checkpoint_round, min(now, record.checkpoint_seconds))
        if record.stage not in newest or newest[record.stage].at < found.at:
            newest[record.stage] = found
    if any(stage not in newest for stage in range(stages)):
        return None
    return min((newest[stage] for stage in range(stages)), key=lambda held: held.at)


def _versions(here: Sequence[Sighting]) -> tuple[tuple[str, int], ...]:
    counts = Counter(_version(known.record) for known in here)
    shown = counts.most_common(SHOWN_VERSIONS)
    rest = counts.total() - sum(count for _, count in shown)
    return (*shown, ("other", rest)) if rest else tuple(shown)
