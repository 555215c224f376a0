"""The command that plays a swarm's faults on a virtual clock: simulate."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peers.errors import UserError
from peers.files import write_atomically

if TYPE_CHECKING:
    from peers.simulation.play import Options
    from peers.simulation.report import Result
    from swarmnet.manifest import Rounds

MOST_PEERS = 64
"""Of one world; groups of hundreds are measured by scripts/bench."""


def simulate(
    run_file: Annotated[
        Path | None, typer.Argument(metavar="RUN.yaml", help="Whose stages and round times to use.")
    ] = None,
    peers: Annotated[int | None, typer.Option(help="[default: 8 to 16, from the seed]")] = None,
    stages: Annotated[int | None, typer.Option(help="[default: 2 to 4, from the seed]")] = None,
    seed: Annotated[int, typer.Option(help="Of the first schedule; the next ones count on.")] = 1,
    schedules: Annotated[int, typer.Option(min=1, help="How many to play.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Settled by every stage, at least.")] = 50,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="Only faults of this kind. Repeatable. `move` and `lost stage` only if named."),
    ] = None,
    moves: Annotated[
        bool, typer.Option("--moves", help="Peers move between stages, by their own decision and ordered.")
    ] = False,
    doubles: Annotated[
        int, typer.Option(min=0, help="So many processes hold two adjacent stages, each as two of the peers.")
    ] = 0,
    real: Annotated[bool, typer.Option("--real", help="Compute with a real, tiny model: slower.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write everything as JSON.")] = None,
) -> None:
    """Play faults from a seed against real peers on a virtual clock, and check that nothing is lost, nothing
    counted twice, and all agree in the end. Exit code 1 if not."""
    from peers.simulation.play import Options
    from peers.simulation.schedules import KINDS, NAMED_KINDS

    kinds = [*KINDS, *NAMED_KINDS]
    wrong = sorted(set(kind or ()).difference(kinds))
    if wrong:
        raise UserError(f"--kind {wrong[0]}: there are {', '.join(kinds)}")
    if "lost stage" in (kind or ()) and not moves:
        raise UserError("--kind 'lost stage': nobody takes a lost stage up without --moves; add it")
    rules, of_run = _of_run(run_file)
    stages = of_run if stages is None else stages
    if (peers is not None and not 2 <= peers <= MOST_PEERS) or (stages is not None and stages < 1):
        raise UserError(f"a world has 2 to {MOST_PEERS} peers and at least one stage")
    if peers is not None and peers < 2 * (stages or 1):
        raise UserError(f"{peers} peers for {stages or 1} stages: each needs two, one to spare")
    options = [
        Options(
            seed + number, peers, stages, rules, tuple(kind or ()), real, rounds,
            moves=moves, doubles=doubles,
        )
        for number in range(schedules)
    ]
    results = []
    for result in _played(options, jobs):
        results.append(result)
        again = _again(result, run_file, peers, stages, rounds, kind)
        again += " --moves" * moves + f" --doubles {doubles}" * (doubles > 0) + " --real" * real
        _show(result, again)
    broken = [result.seed for result in results if result.violations]
    typer.echo(f"{len(results)} schedules, {len(broken)} violated" + (f": seeds {broken}" if broken else ""))
    if report is not None:
        found = [dataclasses.asdict(result) for result in results]
        write_atomically(report, json.dumps(found, indent=1).encode())
    raise typer.Exit(1 if broken else 0)


def _of_run(run_file: Path | None) -> tuple[Rounds | None, int | None]:
    if run_file is None:
        return None, None
    from peers.run_file import load_manifest
    from swarmnet.identifiers import PeerId

    manifest = load_manifest(run_file, PeerId(""), {})
    return manifest.rounds, len(manifest.stages)


def _played(options: list[Options], jobs: int) -> Iterator[Result]:
    """The results, in the order of the seeds."""
    from peers.parallel import pool
    from peers.simulation.report import run_schedule

    if jobs == 1 or len(options) == 1:
        yield from map(run_schedule, options)
        return
    with pool(jobs) as processes:
        yield from processes.map(run_schedule, options)


def _show(result: Result, again: str) -> None:
    from peers.simulation.report import row

    seed, peers, stages, rounds, faults, verdict = row(result)
    typer.echo(f"{seed:>7}  {peers:>2} peers  {stages} stages  {rounds:>16} rounds  {verdict:<8}  {faults}")
    for violation in result.violations:
        typer.echo(f"         {violation.rule}: {violation.text}")
    if result.violations:
        typer.echo(f"         again: {again}")


def _again(
    result: Result, run_file: Path | None, peers: int | None, stages: int | None, rounds: int,
    kind: list[str] | None,
) -> str:  # fmt: skip
    parts = ["swarmnet simulate", str(run_file or ""), f"--seed {result.seed}"]
    parts += [f"--peers {peers}"] if peers else []
    parts += [f"--stages {stages}"] if stages and run_file is None else []
    parts += [f"--rounds {rounds}"] if rounds != 50 else []
    parts += [f"--kind '{name}'" for name in kind or ()]
    return " ".join(part for part in parts if part)
