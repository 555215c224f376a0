"""Report of a chaos run, computed from the peers' event logs alone.

A *life* is one worker of a peer, from `assembled` on: a peer whose p2pd died has several. Each contribution
that was made has one of these outcomes:

    settled       it is in the settled set of its round
    given back    its contributor took its votes back into the momentum, to contribute them again
    superseded    its contributor, started again, made another one for the round, and that one counts
    unseen        its contributor was killed, or lost its p2pd, before a peer had fetched it
    open          its round is not settled, or its contributor left in order before it was decided
    lost          none of these; there must be none

If peers exchange through reducers, sets name results, and the report follows these. A result that is in no
set is left out, and its slices are returned to their senders. The logs do not show whether each slice is
returned; `swarmnet simulate --sharded` checks that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from peers.telemetry import event_log, log_events
from peers.telemetry.event import Event
from peers.telemetry.event_fold import SettledRounds

KEYS = (
    "final_loss",
    "undisturbed_losses",
    "shared_settled_rounds",
    "equal_digest_rounds",
    "contributions_lost",
    "contributions_twice",
    "kill_to_commit_seconds",
    "frozen_to_reroute_seconds",
)
LOSS_ROUNDS = 40
"""Rounds over which a loss is averaged; the loss of one microbatch varies by 0.15 nats."""
KILL_P50_SECONDS, KILL_P99_SECONDS, FROZEN_SECONDS = 1.5, 5.0, 5.0
OPEN_ROUNDS = 4
"""Maximum distance in rounds between two peers in step: `rounds.window`."""
SPREADS = 3.0
"""The disturbed loss must lie within this many standard deviations of the undisturbed ones."""


@dataclass(slots=True)
class InjectedFault:
    """A fault that was injected into a peer. Times are Unix times."""

    kind: str
    name: str
    peer: str
    stage: int
    at: float
    until: float | None = None


@dataclass(slots=True)
class Life:
    """The events of one worker. Times are Unix times."""

    name: str
    peer: str
    began: float
    stage: int
    commits: list[tuple[float, str, int, float | None]] = field(default_factory=list)
    """Committed microbatches: (time, origin, counter, loss)."""
    applied: dict[int, float] = field(default_factory=dict)
    settled: SettledRounds = field(default_factory=SettledRounds)
    settled_at: dict[int, float] = field(default_factory=dict)
    settled_again: int = 0
    """Number of rounds that settled twice in this life, without a fetch of the state between."""
    made: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Own contributions by id: (round, time)."""
    reduced: dict[str, int] = field(default_factory=dict)
    """Rounds of own results, by id."""
    took: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Accepted contributions by id: (round, contributor)."""
    given_back: set[str] = field(default_factory=set)
    undecided: set[str] = field(default_factory=set)
    rerouted: list[tuple[float, frozenset[str]]] = field(default_factory=list)
    """Re-routed microbatches: (time, peers that were tried before)."""
    unlinked: list[tuple[float, str]] = field(default_factory=list)
    in_step: list[float] = field(default_factory=list)
    resynchronised: list[str] = field(default_factory=list)
    stood_still: list[float] = field(default_factory=list)
    """Length of each stall of the process in seconds."""


def read(folder: Path) -> list[Life]:
    """Read all lives from the peers' folders below `folder`."""
    return [life for log in sorted(folder.glob(f"*/{event_log.LOG_FILE}")) for life in read_peer(log)]


def read_peer(path: Path) -> list[Life]:
    lives: list[Life] = []
    peer = ""
    for line in event_log.read(path):
        match line.event:
            case log_events.Started():
                peer = line.event.peer
            case log_events.Assembled(stage):
                lives.append(Life(path.parent.name, peer, line.time, stage))
            case _ if lives:
                _take(lives[-1], line.event, line.time)
    return lives


def _take(life: Life, event: Event, at: float) -> None:
    """Record an event of a peer's log in its `Life`. `at` is the event's time in seconds."""
    match event:
        case log_events.Committed(origin, counter, loss=loss):
            life.commits.append((at, origin, counter, loss))
        case log_events.Applied(round):
            life.applied[round] = at
        case log_events.Settled(round):
            life.settled_again += round in life.settled
            life.settled_at[round] = at
        case log_events.ContributionMade(round, id):
            life.made[id] = (round, at)
        case log_events.Reduced(round, id):
            life.reduced[id] = round
        case log_events.ContributionAccepted(round, id, contributor):
            life.took[id] = (round, contributor)
        case log_events.ContributionReturned(id=id):
            life.given_back.add(id)
        case log_events.Undecided(ids):
            life.undecided |= set(ids)
        case log_events.Resync(reason=reason, fork_round=fork_round):
            life.resynchronised.append(reason)
            if fork_round is None:  # It may settle the same rounds again after this.
                life.settled.clear()
        case log_events.Rerouted(tried=tried):
            life.rerouted.append((at, frozenset(tried)))
        case log_events.Unlinked(peer):
            life.unlinked.append((at, peer))
        case log_events.ProcessStalled(seconds):
            life.stood_still.append(seconds)
        case log_events.InStep():
            life.in_step.append(at)
    life.settled.take(event)


# -- figures ----------------------------------------------------------------------------------------------


def last_round(lives: Iterable[Life]) -> int:
    """Return the newest round that every stage has settled."""
    newest: dict[int, int] = {}
    for life in lives:
        newest[life.stage] = max([newest.get(life.stage, -1), *life.settled])
    return min(newest.values(), default=-1)


def loss_at(lives: Sequence[Life], round: int) -> tuple[float, float] | None:
    """Return the mean training loss (nats per token) of `LOSS_ROUNDS` rounds up to `round`, and its error.

    The error is the standard error of the mean.
    """
    first = [life for life in lives if life.stage == 0]
    ends = [life.applied[round] for life in first if round in life.applied]
    begins = [life.applied[round - LOSS_ROUNDS] for life in first if round - LOSS_ROUNDS in life.applied]
    if not ends or not begins:
        return None
    losses = [
        loss
        for life in first
        for at, _, _, loss in life.commits
        if loss is not None and min(begins) < at <= min(ends)
    ]
    if len(losses) < 2:
        return None
    return fmean(losses), stdev(losses) / len(losses) ** 0.5


def digests(lives: Sequence[Life]) -> tuple[int, list[str]]:
    """Return the number of rounds that two lives of a stage settled, and those with different digests."""
    found: dict[tuple[int, int], list[str]] = {}
    for life in lives:
        for round, settled in life.settled.items():
            if settled.digest:
                found.setdefault((life.stage, round), []).append(settled.digest)
    shared = {place: named for place, named in found.items() if len(named) > 1}
    unequal = [f"stage {s} round {r}" for (s, r), named in sorted(shared.items()) if len(set(named)) > 1]
    return len(shared), unequal


def contributions(lives: Sequence[Life], ended: dict[str, float]) -> dict[str, Any]:
    """Return the outcomes of all contributions, or results.

    `ended`: time at which each peer's process or p2pd was killed.
    """
    through_reducers = any(life.reduced for life in lives)
    newest: dict[int, int] = {}
    settled: dict[str, set[tuple[int, int]]] = {}
    contributors: set[tuple[int, int, str]] = set()
    """(stage, round, contributor) of all settled contributions."""
    made: dict[str, tuple[int, int, str]] = {}
    took: set[str] = set()
    given_back: set[str] = set()
    undecided: set[str] = set()
    for life in lives:
        newest[life.stage] = max([newest.get(life.stage, -1), *life.settled])
        for round, held in life.settled.items():
            for id in held.ids:
                settled.setdefault(id, set()).add((life.stage, round))
        own = life.reduced if through_reducers else {id: round for id, (round, _) in life.made.items()}
        made |= {id: (life.stage, round, life.peer) for id, round in own.items()}
        made |= {
            id: (life.stage, round, contributor)
            for id, (round, contributor) in life.took.items()
            if id not in made
        }
        took |= life.took.keys()
        given_back |= life.given_back
        undecided |= life.undecided
    contributors = {made[id] for id in settled if id in made}
    counts = dict.fromkeys(("contribution_returned", "superseded", "unseen", "open", "left_out"), 0)
    lost = []
    for id, (stage, round, contributor) in made.items():
        if id in settled:
            continue
        if id in given_back:
            counts["contribution_returned"] += 1
        elif round > newest[stage] or id in undecided:
            counts["open"] += 1
        elif (stage, round, contributor) in contributors:
            counts["superseded"] += 1
        elif id not in took and contributor in ended:
            counts["unseen"] += 1
        elif through_reducers:
            counts["left_out"] += 1
        else:
            lost.append(f"{id} of {contributor}, stage {stage}, round {round}")
    twice = [id for id, places in settled.items() if len(places) > 1] + sorted(given_back & settled.keys())
    again = sum(life.settled_again for life in lives)
    repeated = [
        id for life in lives for held in life.settled.values() for id in held.ids if held.ids.count(id) > 1
    ]
    counts |= {"made": len(made), "settled": len(settled)}
    return {**counts, "lost": lost, "twice": twice + repeated, "settled_again": again}


def kills_to_commit(lives: Sequence[Life], faults: Sequence[InjectedFault]) -> list[float]:
    """Return, for each kill, the seconds until the stage committed the next microbatch."""
    waits = []
    for fault in faults:
        if fault.kind != "kill":
            continue
        later = [
            at
            for life in lives
            if life.stage == fault.stage and life.peer != fault.peer
            for at, *_ in life.commits
            if at > fault.at
        ]
        waits.append(min(later, default=float("inf")) - fault.at)
    return waits


def thawed_to_in_step(lives: Sequence[Life], fault: InjectedFault) -> float | None:
    """Return the seconds from the thaw until the peer is within `OPEN_ROUNDS` of its stage's round."""
    if fault.until is None:
        return None
    others = sorted(
        (at, round)
        for life in lives
        if life.stage == fault.stage and life.peer != fault.peer
        for round, at in life.settled_at.items()
    )
    own = sorted((at, r) for life in lives if life.peer == fault.peer for r, at in life.settled_at.items())
    newest, index = -1, 0
    for at, round in own:
        while index < len(others) and others[index][0] <= at:
            newest, index = max(newest, others[index][1]), index + 1
        if at > fault.until and round >= newest - OPEN_ROUNDS:
            return at - fault.until
    return None


def rerouted_from(lives: Sequence[Life], fault: InjectedFault, until: float) -> list[float]:
    """Return, for each microbatch at the faulty peer, the seconds until it was sent to another one."""
    return [
        at - fault.at
        for life in lives
        for at, tried in life.rerouted
        if fault.peer in tried and fault.at < at <= until
    ]


def frozen_to_reroute(lives: Sequence[Life], fault: InjectedFault) -> float | None:
    """Return the seconds until the last microbatch at the frozen peer was sent to another one.

    If it had none, the seconds until all peers of the stage before dropped their link to it, or None.
    """
    until = fault.until or float("inf")
    gone = [
        at - fault.at
        for life in lives
        if life.stage == fault.stage - 1 and life.began < fault.at
        for at, peer in life.unlinked
        if peer == fault.peer and fault.at < at <= until
    ]
    waits = rerouted_from(lives, fault, until) or gone
    return max(waits, default=None)


def progress_gap(lives: Sequence[Life], stage: int) -> float:
    """Return the longest time in seconds without a commit in a stage."""
    times = sorted(at for life in lives if life.stage == stage for at, *_ in life.commits)
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)] if ordered else None


# -- the report -------------------------------------------------------------------------------------------


def build(
    lives: Sequence[Life], faults: Sequence[InjectedFault], calm: Sequence[Sequence[Life]]
) -> dict[str, Any]:
    """Return the report of a chaos run and of undisturbed runs."""
    round = min(last_round(run) for run in [lives, *calm])
    loss = loss_at(lives, round)
    undisturbed = [loss_at(run, round) for run in calm]
    shared, unequal = digests(lives)
    kills = [fault for fault in faults if fault.kind == "kill"]
    ended = {fault.peer: fault.at for fault in faults if fault.kind != "freeze"}
    fate = contributions(lives, ended)
    waits = kills_to_commit(lives, faults)
    frozen = [frozen_to_reroute(lives, fault) for fault in faults if fault.kind == "freeze"]
    moved = [wait for fault in kills for wait in rerouted_from(lives, fault, fault.at + 60.0)]
    commits = [(life.stage, origin, counter) for life in lives for _, origin, counter, _ in life.commits]
    calm_fates = [contributions(run, {}) for run in calm]
    return {
        "final_loss": loss[0] if loss else None,
        "undisturbed_losses": [found[0] for found in undisturbed if found],
        "shared_settled_rounds": shared,
        "equal_digest_rounds": shared - len(unequal),
        "contributions_lost": len(fate["lost"]),
        "contributions_twice": len(fate["twice"]) + fate["settled_again"],
        "kill_to_commit_seconds": {"p50": quantile(waits, 0.5), "p99": quantile(waits, 0.99)},
        "frozen_to_reroute_seconds": frozen[0] if frozen else None,
        "compared_at_round": round,
        "loss_standard_errors": [found[1] if found else None for found in [loss, *undisturbed]],
        "unequal_digests": unequal,
        "contributions": fate,
        "undisturbed_contributions": calm_fates,
        "undisturbed_unequal_digests": [digests(run)[1] for run in calm],
        "kill_to_reroute_seconds": {
            "count": len(moved),
            "p50": quantile(moved, 0.5),
            "p99": quantile(moved, 0.99),
        },
        "longest_pause_seconds": {
            str(stage): progress_gap(lives, stage) for stage in sorted({life.stage for life in lives})
        },
        "p2pd_killed_to_in_step_seconds": _back(lives, faults),
        "thawed_to_in_step_seconds": [
            thawed_to_in_step(lives, fault) for fault in faults if fault.kind == "freeze"
        ],
        "process_stalled": {life.name: life.stood_still for life in lives if life.stood_still},
        "microbatches": {
            "committed": len(commits),
            "repeated_across_peers": len(commits) - len(set(commits)),
        },
        "resynchronised": [reason for life in lives for reason in life.resynchronised],
        "faults": [
            {"kind": f.kind, "peer": f.peer, "name": f.name, "stage": f.stage, "at": f.at, "until": f.until}
            for f in faults
        ],
    }


def _back(lives: Sequence[Life], faults: Sequence[InjectedFault]) -> list[float | None]:
    """Return, for each killed p2pd, the seconds until its peer was in step again."""
    waits: list[float | None] = []
    for fault in faults:
        if fault.kind == "kill p2pd":
            later = [at for life in lives if life.peer == fault.peer for at in life.in_step if at > fault.at]
            waits.append(min(later) - fault.at if later else None)
    return waits


def failures(report: dict[str, Any]) -> list[str]:
    """Return the promises that did not hold, one line each."""
    calm, loss = report["undisturbed_losses"], report["final_loss"]
    kill, frozen = report["kill_to_commit_seconds"], report["frozen_to_reroute_seconds"]
    worst = fmean(calm) + SPREADS * stdev(calm) if len(calm) > 1 else float("inf")
    checks = [
        (loss is not None and loss <= max([worst, *calm]), f"final loss {loss} against {calm}"),
        (report["shared_settled_rounds"] > 0, "no settled round is shared"),
        (not report["unequal_digests"], f"digests differ: {report['unequal_digests'][:5]}"),
        (report["contributions_lost"] == 0, f"lost: {report['contributions']['lost'][:5]}"),
        (report["contributions_twice"] == 0, f"twice: {report['contributions']['twice'][:5]}"),
        (_within(kill["p50"], KILL_P50_SECONDS), f"kill to commit, p50: {kill['p50']} s"),
        (_within(kill["p99"], KILL_P99_SECONDS), f"kill to commit, p99: {kill['p99']} s"),
        (_within(frozen, FROZEN_SECONDS), f"frozen to re-routed: {frozen} s"),
    ]
    return [what for held, what in checks if not held]


def _within(seconds: float | None, limit: float) -> bool:
    return seconds is not None and seconds <= limit
