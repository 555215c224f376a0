"""The result of a schedule as data and as text: its events, the verdict, and the command that repeats it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from peers.compute.executor import set_threads
from peers.lab.faults.invariants import check
from peers.lab.faults.play import FAULT_SECONDS, MIN_ROUNDS, Options, ScheduleRecord, play
from peers.lab.faults.trees import Violation, stages_of, with_processes
from peers.lab.world.parallel import pool
from peers.telemetry.log_events import Settled


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one schedule."""

    seed: int
    peers: int
    stages: int
    faults: dict[str, int]
    events: dict[str, int]
    rounds: dict[int, int]
    """Newest settled round of each stage."""
    healed_at: float
    ended_at: float
    log: str
    """SHA-256 of all peers' event logs."""
    violations: tuple[Violation, ...]


def run_schedule(options: Options) -> Result:
    """Run one schedule in a process of the command, and check its invariants.

    It computes with one thread: with tensors as small as these, more threads only wait for each other.
    """
    set_threads(1)
    seen = play(options)
    kinds = Counter(type(fault).__name__ for fault in seen.faults)
    return Result(
        options.seed,
        seen.peers,
        seen.stages,
        dict(sorted(kinds.items())),
        dict(sorted(Counter(note.event for note in seen.notes).items())),
        _rounds(seen),
        seen.healed_at,
        seen.ended_at,
        log_digest(seen),
        tuple(check(seen)),
    )


def played(options: Sequence[Options], jobs: int) -> Iterator[Result]:
    """Run schedules in `jobs` processes; yield the results in the order of the schedules."""
    if jobs == 1 or len(options) == 1:
        yield from map(run_schedule, options)
        return
    with pool(jobs) as processes:
        yield from processes.map(run_schedule, options)


def log_digest(seen: ScheduleRecord) -> str:
    digest = hashlib.sha256()
    for note in seen.notes:
        digest.update(f"{note.line()}\n".encode())
    return digest.hexdigest()


def _rounds(seen: ScheduleRecord) -> dict[int, int]:
    newest: dict[int, int] = {}
    stages = stages_of(seen.notes)
    for who, note in with_processes(seen.notes):
        if isinstance(note.what, Settled):
            stage = stages[who]
            newest[stage] = max(newest.get(stage, -1), note.what.round)
    return dict(sorted(newest.items()))


def row(result: Result) -> tuple[str, ...]:
    """Return a row of the table: seed, peers, stages, rounds, faults, verdict."""
    faults = ", ".join(f"{name} {count}" if count > 1 else name for name, count in result.faults.items())
    rounds = "/".join(str(round + 1) for round in result.rounds.values())
    verdict = "holds" if not result.violations else f"VIOLATED: {result.violations[0].rule}"
    return (str(result.seed), str(result.peers), str(result.stages), rounds, faults, verdict)


def again(of: Options, seed: int, run_file: Path | None) -> str:
    """Return the command that runs a schedule again."""
    parts = ["swarmnet simulate", str(run_file or ""), f"--seed {seed}"]
    parts += [f"--peers {of.peers}"] if of.peers else []
    parts += [f"--stages {of.stages}"] if of.stages else []
    parts += [f"--helpers {of.helpers}"] if of.helpers else []
    parts += [f"--rounds {of.rounds}"] if of.rounds != MIN_ROUNDS else []
    parts += [f"--seconds {of.seconds:g}"] if of.seconds != FAULT_SECONDS else []
    parts += [f"--kind '{name}'" for name in of.kinds]
    parts += [f"--method {of.sync.method}"] if of.sync is not None else []
    flags = {"moves": of.moves, "real": of.real, "sharded": of.sharded, "experts": of.experts}
    parts += [f"--{name}" for name, is_set in flags.items() if is_set]
    return " ".join(part for part in parts if part)
