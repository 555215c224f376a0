"""Commands that measure: bench contribution, transfer, group, moving, routing, paths, learning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

TABLE_COLUMNS = 200
"""Width of the table of paths: it does not fit in fewer."""


def contribution(
    parameters: Annotated[int, typer.Option(min=4096, help="Size of the model, about.")] = 1_000_000,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Repeats per figure.")] = 9,
) -> None:
    """Bytes and time of a contribution, beside a straightforward float DeMo."""
    from peers.bench.contribution import bench, render
    from protocols.envelope import ENVELOPE_BYTES
    from protocols.frames import wire_bytes
    from protocols.messages import Contribution, encode

    overhead = wire_bytes(len(encode(Contribution())), ENVELOPE_BYTES)
    typer.echo(render(bench(parameters, overhead_bytes=overhead, repeats=repeats)))


def transfer(
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Repeats per figure.")] = 5,
) -> None:
    """Speed and latency of activations over p2pd links, beside plain asyncio TCP."""
    from peers.bench.transfer import bench, render

    typer.echo(render(bench(repeats)))


def group(
    peers: Annotated[
        list[int] | None, typer.Option(min=2, max=2048, help="Size of a group; may be repeated.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=15.0, max=600.0, help="On the groups' own clock.")] = 21.0,
    contribution_bytes: Annotated[
        int, typer.Option(min=100, max=10_000_000, help="Size of each contribution.")
    ] = 24_000,
    seed: Annotated[int, typer.Option(min=0, max=255, help="Of delays and times.")] = 1,
) -> None:
    """How fast contributions reach everybody in groups of 8, 64 and 512 peers, and what that costs."""
    from peers.bench.group import bench, render

    typer.echo(render(bench(peers or [8, 64, 512], contribution_bytes, seconds, seed)))


def moving(
    stages: Annotated[list[int] | None, typer.Option(min=2, max=64, help="Repeatable. [default: 8]")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Traces.")] = 10,
    machines: Annotated[int, typer.Option(min=8, max=10_000, help="Wanted at all times.")] = 400,
    hours: Annotated[float, typer.Option(min=0.1, max=1000.0, help="Of each trace.")] = 32.0,
    download: Annotated[float, typer.Option(min=0.0, max=3600.0, help="Seconds to fetch a stage.")] = 60.0,
    slowest: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Speed of the slowest machine; the fastest has 1.")
    ] = 1.0,
) -> None:
    """Moving between stages on a trace of preemptions, beside SWARM's rule and no moving."""
    from peers.preemption.bench import HEADER, bench, describe, render
    from peers.preemption.trace import Climate

    climate = Climate(machines=machines, hours=hours, slowest_share=slowest)
    typer.echo(f"{describe(climate, seeds)}; fetching a stage takes {download:g} s\n")
    typer.echo(HEADER)
    for number in stages or [8]:
        for row in bench(climate, number, seeds, download):
            typer.echo(render(row))


def routing(
    swarms: Annotated[int, typer.Option(min=1, max=10_000, help="How many are drawn.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Of the first; the next ones count on.")] = 0,
    slots: Annotated[int, typer.Option(min=1, max=1024, help="Microbatches a peer takes from others.")] = 64,
    in_flight: Annotated[int, typer.Option(min=1, max=1024, help="At most, of an origin's own.")] = 1024,
    jobs: Annotated[int, typer.Option(min=1, max=64, help="Processes.")] = 1,
    each: Annotated[bool, typer.Option("--each", help="Also a line for every swarm.")] = False,
) -> None:
    """Throughput of random heterogeneous swarms as a share of the maximum flow, for three routing rules."""
    from peers.capacity.routing import HEADER, bench, render

    limits = f"{slots} slots per peer, at most {in_flight} in flight per origin"
    typer.echo(f"{swarms} swarms from seed {seed}, {limits}; shares of the maximum flow\n")
    typer.echo(HEADER)
    for rule, played in bench(range(seed, seed + swarms), slots, in_flight, jobs):
        typer.echo(render(rule, played))
        for one in played if each else ():
            of = f"{one.peers} peers, {one.stages} stages"
            typer.echo(f"    seed {one.seed}: {of}, {one.share:.3f} of {one.most:.2f} microbatches/s")


def paths(
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Topologies.")] = 3,
    memory: Annotated[
        list[int] | None, typer.Option(min=1, max=64, help="Microbatches per peer. Repeatable. [default: 3]")
    ] = None,
    first: Annotated[int, typer.Option(min=0, help="Of the topologies; the next ones count on.")] = 0,
    shared: Annotated[
        bool, typer.Option("--shared", help="Bodies between two peers go one after the other.")
    ] = False,
) -> None:
    """Real workers that skip a third of the stages on a map of 12 cities, beside the router by itself."""
    from rich.console import Console

    from peers.skipping.in_peers import Lines, bench, render

    console = Console(width=TABLE_COLUMNS)
    lines: Lines = "shared" if shared else "alone"
    for number in memory or [3]:
        console.print(render(list(bench(range(first, first + seeds), number, lines)), lines))


def learning(
    run_files: Annotated[list[Path], typer.Argument(metavar="RUN.yaml...", help="Runs of several sizes.")],
    method: Annotated[list[str] | None, typer.Option(help="Repeatable. [default: all]")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Of all peers, in each trial. [default: 20 per parameter]")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Trials at the best rate.")] = 3,
    peers: Annotated[int, typer.Option(min=1, max=1024, help="Each computes one microbatch a step.")] = 4,
    delay: Annotated[int, typer.Option(min=0, max=16, help="Rounds later that a round is applied.")] = 0,
    rate: Annotated[float | None, typer.Option(min=0, help="Of every method, instead of a search.")] = None,
    eval_text: Annotated[Path | None, typer.Option(metavar="FILE", help="To judge by.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(metavar="FILE", help="If not beside the run.")] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Trials, reports, pictures.")] = Path("learning"),
    pictures: Annotated[bool, typer.Option("--pictures", help="Draw curves (extra `pictures`).")] = False,
) -> None:
    """What a run learns by each method, beside AdamW, Muon and DeMo at equal tokens. Interrupted, it goes on
    where it was."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from peers.bench.learning.bench import Question, bench
    from peers.bench.learning.report import as_json, draw, render
    from peers.bench.learning.trials import Trial

    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    for run_file in run_files:
        with Progress(*columns, transient=True) as progress:
            task = progress.add_task("")

            def said(trial: Trial, done: int) -> None:
                words = f"{trial.method} at {trial.rate:.2g}, seed {trial.seed}"
                progress.update(task, description=words, completed=done, total=trial.steps)  # noqa: B023

            report = bench(
                Question(
                    run_file, method or (), tokens, seeds, peers, delay, out / run_file.stem, eval_text,
                    tokenizer, rate,
                ),
                said,
            )  # fmt: skip
        (out / run_file.stem / "report.json").write_text(as_json(report))
        typer.echo(render(report) + "\n")
        for file in draw(report, out / run_file.stem) if pictures else ():
            typer.echo(f"wrote  {file}")
