"""A schedule's result as data and as text: what happened, the verdict, and how to see it again."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass

from peers.lab.faults.invariants import check
from peers.lab.faults.play import Options, Seen, play
from peers.lab.faults.trees import Violation, makers, stages_of
from peers.telemetry.events import Settled


@dataclass(frozen=True, slots=True)
class Result:
    """One schedule."""

    seed: int
    peers: int
    stages: int
    faults: dict[str, int]
    events: dict[str, int]
    rounds: dict[int, int]
    """Stage -> newest settled round."""
    healed_at: float
    ended_at: float
    log: str
    """SHA-256 of everything that every peer noted."""
    violations: tuple[Violation, ...]


def run_schedule(options: Options) -> Result:
    """Play one schedule and check it."""
    seen = play(options)
    kinds = Counter(type(fault).__name__ for fault in seen.faults)
    return Result(
        options.seed, seen.peers, seen.stages, dict(sorted(kinds.items())),
        dict(sorted(Counter(note.event for note in seen.notes).items())), _rounds(seen), seen.healed_at,
        seen.ended_at, log_digest(seen), tuple(check(seen)),
    )  # fmt: skip


def log_digest(seen: Seen) -> str:
    digest = hashlib.sha256()
    for note in seen.notes:
        digest.update(f"{note.line()}\n".encode())
    return digest.hexdigest()


def _rounds(seen: Seen) -> dict[int, int]:
    newest: dict[int, int] = {}
    stages = stages_of(seen.notes)
    for who, note in makers(seen.notes):
        if isinstance(note.what, Settled):
            stage = stages[who]
            newest[stage] = max(newest.get(stage, -1), note.what.round)
    return dict(sorted(newest.items()))


def row(result: Result) -> tuple[str, ...]:
    """A line of the table: seed, peers, stages, rounds, faults, verdict."""
    faults = ", ".join(f"{name} {count}" if count > 1 else name for name, count in result.faults.items())
    rounds = "/".join(str(round + 1) for round in result.rounds.values())
    verdict = "holds" if not result.violations else f"VIOLATED: {result.violations[0].rule}"
    return (str(result.seed), str(result.peers), str(result.stages), rounds, faults, verdict)
