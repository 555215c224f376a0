"""Commands that measure or test without the internet: bench, simulate, plan and chaos.

A schedule is a list of faults (crashes, partitions and others) that a seed draws for a simulated swarm. A
round settles when its set of contributions can no longer change. In a sharded reduction each reducer sums a
part of the weights for all.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from peers.config.atomic_files import require_free, write_atomically
from peers.config.compute_file import DeviceName
from peers.config.errors import UserError
from swarmnet.model.computing.choices import (
    ActivationCheckpointing,
    Computing,
    DtypeName,
    OptimizerStateDevice,
)
from swarmnet.run.schema import Sync
from swarmnet.run.sync_methods import DEFAULT_LOCAL_METHOD, PRESETS, MethodName

if TYPE_CHECKING:
    from peers.lab.bench.learning.bench import BenchConfig
    from peers.lab.bench.learning.learning_report import LearningReport as Learned
    from peers.lab.bench.learning.trials import Trial
    from peers.lab.faults.fault_report import Result
    from peers.lab.planner.plan_request import PlanRequest
    from peers.lab.planner.planned_links import Links
    from peers.lab.planner.speeds import PeerClass
    from swarmnet.run.manifest import Manifest
    from swarmnet.run.schema import Rounds


TABLE_COLUMNS = 200  # The table of paths does not fit in fewer.


def memory(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="Run file.")],
    stage: Annotated[int, typer.Option(min=0, help="Stage to measure.")] = 0,
    dtype: Annotated[DtypeName, typer.Option(help="`compute.dtype` of the peer file.")] = "fp32",
    activation_checkpointing: Annotated[
        ActivationCheckpointing, typer.Option(help="`compute.activation_checkpointing` of the peer file.")
    ] = "none",
    devices: Annotated[
        int, typer.Option(min=1, max=64, help="`compute.devices` of the peer file, on the CPU.")
    ] = 1,
    device: Annotated[DeviceName, typer.Option(help="`device` of the peer file.")] = "cpu",
    optimizer_state: Annotated[
        OptimizerStateDevice, typer.Option(help="`compute.optimizer_state` of the peer file.")
    ] = "device",
) -> None:
    """Measure a stage's memory per parameter on this machine, compared with the estimate that peers use."""
    from peers.compute.stage_part import device_of
    from peers.config.run_file import load_straight_manifest
    from peers.lab.bench.memory import bench, bench_devices, render, render_devices

    manifest = load_straight_manifest(run_file)
    if stage >= len(manifest.stages):
        raise UserError(f"--stage {stage}: {run_file} has stages 0 to {len(manifest.stages) - 1}")
    computing = Computing(dtype, activation_checkpointing, optimizer_state=optimizer_state)
    if devices > 1:
        typer.echo(render_devices(bench_devices(manifest, stage, devices, computing)))
    else:
        typer.echo(render(bench(manifest, stage, computing, device_of(device))))


def training(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="Run file.")],
    microbatches: Annotated[
        int, typer.Option(min=1, max=10_000, help="Microbatches per repeat of each loop.")
    ] = 16,
    repeats: Annotated[int, typer.Option(min=1, max=1000, help="Number of repeats.")] = 7,
    processes: Annotated[
        bool, typer.Option("--processes", help="Measure real peers on this machine, one process each.")
    ] = False,
    seconds: Annotated[
        float, typer.Option(min=5, max=3600, help="With --processes: duration of each of two swarms.")
    ] = 60.0,
    device: Annotated[DeviceName, typer.Option(help="`device` of the peer file; one process only.")] = "cpu",
    compiled: Annotated[
        bool, typer.Option("--compile", help="`compute.compile` of the peer file, for all loops.")
    ] = False,
) -> None:
    """Measure tokens per second of one peer with the whole model, and of all stages together.

    The baseline is a plain PyTorch loop with the same model and microbatches.
    """
    import asyncio

    from peers.compute.stage_part import computing_of, device_of
    from peers.config.compute_file import ComputeFile
    from peers.config.run_file import load_straight_manifest
    from peers.lab.bench import training, training_processes

    manifest = load_straight_manifest(run_file)
    if processes:
        costs = asyncio.run(training_processes.bench(run_file, manifest, seconds))
        typer.echo(training_processes.render(costs))
        return
    torch_device = device_of(device)
    setup = training.ComputeSetup(torch_device, computing_of(ComputeFile(compile=compiled), torch_device))
    typer.echo(training.render(training.bench(manifest, microbatches, repeats, setup)))


def group(
    peers: Annotated[
        list[int] | None, typer.Option(min=2, max=2048, help="Size of a group. Repeatable.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=15.0, max=600.0, help="Duration in virtual time.")] = 21.0,
    contribution_bytes: Annotated[
        int, typer.Option(min=100, max=10_000_000, help="Size of each contribution.")
    ] = 24_000,
    seed: Annotated[int, typer.Option(min=0, max=255, help="Seed of delays and times.")] = 1,
    shards: Annotated[
        int, typer.Option(min=0, max=64, help="Shards of a sharded reduction. 0: all-gather.")
    ] = 0,
    kills: Annotated[bool, typer.Option("--kills", help="Kill the first reducer of every round.")] = False,
    helpers: Annotated[
        int, typer.Option(min=0, max=64, help="Further peers that only reduce (role reducer).")
    ] = 0,
    lies: Annotated[
        bool, typer.Option("--lies", help="With helpers: one lies in every round, and is excluded.")
    ] = False,
) -> None:
    """Measure how fast contributions reach all peers in groups of 8, 64 and 512, and at what cost."""
    from peers.lab.bench.group import measure, render

    if (kills or helpers) and not shards:
        raise UserError("--kills and --helpers: only a sharded reduction has reducers; add --shards")
    if lies and not helpers:
        raise UserError("--lies: no helper could lie; add --helpers")
    rows = [
        measure(size, contribution_bytes, seconds, seed, shards, kills, helpers, lies)
        for size in peers or [8, 64, 512]
    ]
    typer.echo(render(rows))


def paths(
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Number of topologies.")] = 3,
    memory: Annotated[
        list[int] | None, typer.Option(min=1, max=64, help="Microbatches per peer. Repeatable. [default: 3]")
    ] = None,
    first: Annotated[int, typer.Option(min=0, help="Seed of the first topology; the others follow.")] = 0,
    shared: Annotated[bool, typer.Option("--shared", help="A link sends one microbatch at a time.")] = False,
    full_paths: Annotated[float, typer.Option(min=0, max=1, help="Share of full paths.")] = 0.0,
) -> None:
    """Let real workers skip a third of the stages on a map of 12 cities, compared with the router alone."""
    from rich.console import Console

    from peers.lab.bench.paths_in_peers import Lines, bench, render

    console = Console(width=TABLE_COLUMNS)
    lines: Lines = "shared" if shared else "alone"
    for microbatches in memory or [3]:
        topologies = list(bench(range(first, first + seeds), microbatches, lines, full_paths))
        console.print(render(topologies, lines))


MicrobatchesOption: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Microbatches of each peer per trial, instead of --tokens: as many rounds with any --peers.",
    ),
]
DemoReportsOption: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="REPORT", help="Also draw this report of `swarmnet demo --report REPORT`. Repeatable."
    ),
]

LateOption: TypeAlias = Annotated[
    float,
    typer.Option(min=0, max=1, help="Fraction of contributions that arrive after the end of their round."),
]
LiarsOption: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="N:KIND",
        help="Liars: flip, noise, zero, repeat, copy, collude, covert, lazy, slow-flip, honest-first",
    ),
]
SplitOption: TypeAlias = Annotated[
    str,
    typer.Option(
        metavar="SIZES",
        help="Owners of text: parts of these sizes (1:10:100), each a source (kinds), or both.",
    ),
]


def learning(
    run_files: Annotated[
        list[Path], typer.Argument(metavar="RUN.yaml...", help="Run files of several sizes.")
    ],
    method: Annotated[
        list[str] | None, typer.Option(help="Method to compare. Repeatable. [default: all]")
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens per trial, all peers together. [default: 20 per parameter]"),
    ] = None,
    microbatches: MicrobatchesOption = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Trials at the best learning rate.")] = 3,
    peers: Annotated[
        int, typer.Option(min=1, max=1024, help="Number of peers; each computes a microbatch per step.")
    ] = 4,
    delay: Annotated[
        int, typer.Option(min=0, max=16, help="Rounds until a round is applied. In a swarm: 1.")
    ] = 1,
    away: Annotated[int, typer.Option(min=0, help="Number of peers that pause in the middle third.")] = 0,
    late: LateOption = 0.0,
    liars: LiarsOption = "",
    split: SplitOption = "",
    rate: Annotated[
        float | None, typer.Option(min=0, help="Learning rate of all methods. [default: searched]")
    ] = None,
    local_steps: Annotated[
        int,
        typer.Option("--steps", min=0, help="Local steps per round. [default: the method's]"),
    ] = 0,
    device: Annotated[DeviceName, typer.Option(help="`device` of the peer file.")] = "cpu",
    jobs: Annotated[int, typer.Option(min=1, help="Trials to run in parallel.")] = 1,
    eval_text: Annotated[Path | None, typer.Option(metavar="FILE", help="Text to score on.")] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The runs' tokenizer.json. [default: next to the run file]"),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for trials, reports and pictures.")] = Path(
        "learning"
    ),
    pictures: Annotated[bool, typer.Option("--pictures", help="Draw curves (extra `pictures`).")] = False,
    demo: DemoReportsOption = None,
) -> None:
    """Compare what a run learns with each method, and with AdamW, Muon and DeMo, at equal tokens. An
    interrupted benchmark continues."""
    from peers.compute.stage_part import device_of
    from peers.lab.bench.learning.bench import BenchConfig
    from peers.lab.bench.learning.learning_report import as_json, demo_curve, draw, render

    demos = {file.stem: demo_curve(file) for file in demo or ()}
    for run_file in run_files:
        folder = out / run_file.stem
        report = _run_learning_bench(
            BenchConfig(
                run_file=run_file,
                methods=method or (),
                tokens=tokens,
                microbatches=microbatches,
                seeds=seeds,
                peers=peers,
                delay=delay,
                out=folder,
                eval_text=eval_text,
                tokenizer=tokenizer,
                away=away,
                late=late,
                liars=liars,
                split=split,
                rate=rate,
                local_steps=local_steps,
                device=device_of(device),
                jobs=jobs,
            )
        )
        (folder / "report.json").write_text(as_json(report))
        typer.echo(render(report) + "\n")
        for file in draw(report, folder, demos) if pictures else ():
            typer.echo(f"wrote  {file}")


def _run_learning_bench(config: BenchConfig) -> Learned:
    """Run the learning benchmark, with a progress bar for each trial, and return its report. A trial trains
    one method at one learning rate and seed."""
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    from peers.lab.bench.learning.bench import bench

    bars = dict["Trial", TaskID]()
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), transient=True
    ) as progress:

        def show_progress(trial: Trial, done: int) -> None:
            """Set the bar of a trial to `done` steps; a finished trial's bar is hidden."""
            if trial not in bars:
                label = f"{trial.method} at {trial.rate:.2g}, seed {trial.seed}"
                bars[trial] = progress.add_task(label, total=trial.steps)
            progress.update(bars[trial], completed=done, visible=done < trial.steps)

        return bench(config, show_progress)


MAX_PEERS = 64
"""Maximum peers of a simulated swarm. scripts/bench measures groups of hundreds."""


def simulate(
    run_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN.yaml",
            help="Run file with the stages and round times to use; with --real also its `sync`.",
        ),
    ] = None,
    peers: Annotated[
        int | None, typer.Option(help="Number of peers. [default: 8 to 16, from the seed]")
    ] = None,
    stages: Annotated[
        int | None, typer.Option(help="Number of stages. [default: 2 to 4, from the seed]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the first schedule; the others follow.")] = 1,
    schedules: Annotated[int, typer.Option(min=1, help="Number of schedules to simulate.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Schedules to simulate in parallel.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that every stage must settle.")] = 50,
    seconds: Annotated[float, typer.Option(min=20, help="Virtual seconds in which faults begin.")] = 50.0,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="Only faults of this kind. Repeatable. `move` and `lost stage` must be named."),
    ] = None,
    moves: Annotated[
        bool, typer.Option("--moves", help="Let peers move between stages, on their own and on request.")
    ] = False,
    sharded: Annotated[bool, typer.Option("--sharded", help="Use a sharded reduction.")] = False,
    helpers: Annotated[int, typer.Option(min=0, max=16, help="With --sharded: peers that only reduce.")] = 0,
    real: Annotated[
        bool, typer.Option("--real", help="Compute with a real, tiny model, which is slower.")
    ] = False,
    method: Annotated[MethodName | None, typer.Option(help="With --real: sync.method of the run.")] = None,
    experts: Annotated[
        bool,
        typer.Option("--experts", help="With --real: two groups of experts, of which each peer trains one."),
    ] = False,
    report: Annotated[Path | None, typer.Option(help="Write a JSON report to this file.")] = None,
) -> None:
    """Simulate faults from a seed with real peer code on a virtual clock.

    Checks that nothing is lost or counted twice and that all peers agree in the end. Exit code 1 if not.
    """
    from peers.lab.faults.fault_report import again, played
    from peers.lab.faults.play import Options

    _check_kinds(kind or (), moves)
    run_rounds, run_stages, sync = _run_sections(run_file, method)
    _check_model(real, sync.method if real and sync is not None else method, experts)
    sharded |= real and sync is not None and sync.topology == "sharded-reduce"
    if helpers and not sharded:
        raise UserError("--helpers: only a sharded reduction has reducers; add --sharded")
    stages = run_stages if stages is None else stages
    _check_size(peers, stages)
    options = [
        Options(
            seed=seed + number,
            peers=peers,
            stages=stages,
            rules=run_rounds,
            kinds=tuple(kind or ()),
            real=real,
            rounds=rounds,
            seconds=seconds,
            moves=moves,
            sharded=sharded,
            helpers=helpers,
            sync=sync if real else None,
            experts=experts,
        )
        for number in range(schedules)
    ]
    results = []
    for result in played(options, jobs):
        results.append(result)
        _print_result(result, again(options[0], result.seed, run_file))
    if report is not None:
        rows = [dataclasses.asdict(result) for result in results]
        write_atomically(report, json.dumps(rows, indent=1).encode())
    raise typer.Exit(1 if _print_violations(results) else 0)


def _check_size(peers: int | None, stages: int | None) -> None:
    """Raise UserError unless there are at most MAX_PEERS peers, and two per stage. None: the seed decides."""
    if (peers is not None and not 2 <= peers <= MAX_PEERS) or (stages is not None and stages < 1):
        raise UserError(f"a world has 2 to {MAX_PEERS} peers and at least one stage")
    if peers is not None and peers < 2 * (stages or 1):
        raise UserError(f"{peers} peers for {stages or 1} stages: each needs two, one to spare")


def _check_model(real: bool, method: MethodName | None, experts: bool) -> None:
    """Raise UserError if `--method` or `--experts` is given without `--real`, or `--experts` with a method
    without local steps."""
    if method is not None and not real:
        raise UserError(f"--method {method} needs a model; add --real")
    if experts and (not real or method not in (None, *PRESETS)):
        raise UserError(
            f"--experts needs --real and a local-step method, such as --method {DEFAULT_LOCAL_METHOD}"
        )


def _check_kinds(typed: Sequence[str], moves: bool) -> None:
    """Raise UserError if a kind of fault is unknown. Without `--moves`, `lost stage` (all peers of a stage
    die) is refused, too."""
    from peers.lab.faults.schedules import KINDS, NAMED_KINDS

    kinds = [*KINDS, *NAMED_KINDS]
    unknown = sorted(set(typed).difference(kinds))
    if unknown:
        raise UserError(f"--kind {unknown[0]}: unknown; write one of {', '.join(kinds)}")
    if "lost stage" in typed and not moves:
        raise UserError("--kind 'lost stage': no peer takes over a lost stage without --moves; add it")


def _run_sections(
    run_file: Path | None, method: MethodName | None
) -> tuple[Rounds | None, int | None, Sync | None]:
    """Return the section `rounds` of a run file, its number of stages, and its section `sync` with this
    method; None of each that neither gives."""
    if run_file is None:
        return None, None, None if method is None else Sync().with_method(method)
    from peers.config.run_file import load_manifest
    from swarmnet.identifiers import PeerId

    manifest = load_manifest(run_file, PeerId(""), {})
    sync = manifest.sync if method is None else manifest.sync.with_method(method)
    return manifest.rounds, len(manifest.stages), sync


def _print_violations(results: Sequence[Result]) -> list[int]:
    """Print how many schedules were violated, and return their seeds."""
    seeds = [result.seed for result in results if result.violations]
    typer.echo(f"{len(results)} schedules, {len(seeds)} violated{f': seeds {seeds}' if seeds else ''}")
    return seeds


def _print_result(result: Result, again: str) -> None:
    """Print a schedule's result, the rules that it violated, and the command `again` that repeats it."""
    from peers.lab.faults.fault_report import row

    seed, peers, stages, rounds, faults, verdict = row(result)  # Texts of the columns.
    typer.echo(f"{seed:>7}  {peers:>2} peers  {stages} stages  {rounds:>16} rounds  {verdict:<8}  {faults}")
    for violation in result.violations:
        typer.echo(f"         {violation.rule}: {violation.text}")
    if result.violations:
        typer.echo(f"         again: {again}")


def plan(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="Run file.")],
    peers: Annotated[
        str,
        typer.Option(
            help="Classes of peers, separated by commas: COUNTxSPEED@DOWN/UP:MEMORY. SPEED: tokens per "
            "second with the whole model; DOWN/UP: Mbit/s (DOWN/UP/0.5% adds packet loss); with --links, "
            ":REGION. Example: 9000x500tps@100/20:24GB,1000x20ktps@1000/1000."
        ),
    ],
    churn: Annotated[
        float, typer.Option(min=0, max=100, help="Fraction of the peers that leave per hour.")
    ] = 0.0,
    latency: Annotated[
        str | None, typer.Option(help="Range of one-way latencies. [default: 5ms-150ms]")
    ] = None,
    links: Annotated[
        Path | None,
        typer.Option(metavar="LINKS.yaml", help="Table of regions and links, instead of --latency."),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to train. [default: to the end of the decay]")
    ] = None,
    cores: Annotated[
        int, typer.Option(min=0, help="CPU cores that all peers share. 0: each has its own.")
    ] = 0,
    slots: Annotated[
        int, typer.Option(min=1, max=1024, help="`slots` and `in_flight` of the peer files.")
    ] = 32,
    simulate: Annotated[
        int,
        typer.Option(min=0, max=100_000, help="Number of peers to simulate. 0: as many as take a minute."),
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the simulation.")] = 0,
    shape: Annotated[
        bool,
        typer.Option(
            "--shape", help="Search the best stages, microbatches, topology and rounds for these peers."
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="With --shape: run file to write.")] = None,
) -> None:
    """Estimate what given peers achieve in a run: tokens/s compared with a single peer, days, bytes,
    bottleneck and cost of churn.

    With --shape, searches how the run should be divided for them.
    """
    from peers.config.run_file import load_straight_manifest
    from peers.lab.planner.plan import plan as estimate
    from peers.lab.planner.plan_report import render
    from peers.lab.planner.plan_request import PlanRequest

    if out is not None and not shape:
        raise UserError("--out writes the shape that was found; add --shape")
    classes, latency_range, link_table = _parse_swarm(peers, latency, links)
    manifest = load_straight_manifest(run_file)
    request = PlanRequest(
        classes, latency_range, churn, tokens, cores, slots, simulated=simulate, seed=seed, links=link_table
    )
    if shape:
        _find_shape(manifest, request, run_file, out)
    else:
        typer.echo(render(estimate(manifest, request)))


def _parse_swarm(
    peers: str, latency: str | None, links: Path | None
) -> tuple[tuple[PeerClass, ...], tuple[float, float], Links | None]:
    """Parse `--peers`, `--latency` and `--links`. Return the classes of peers, the range of latencies in
    seconds, and the table of links between regions or None. Raises UserError."""
    from peers.lab.planner import planned_links as tables
    from peers.lab.planner.speeds import peer_classes

    if links is not None and latency is not None:
        raise UserError("--links replaces --latency: leave one of them out")
    table = tables.load(links) if links is not None else None
    try:
        classes = peer_classes(peers, table.lines if table is not None else None)
        return classes, tables.seconds_range(latency or "5ms-150ms"), table
    except ValueError as error:
        raise UserError(f"--peers or --latency: {error}") from None


def _find_shape(manifest: Manifest, request: PlanRequest, run_file: Path, out: Path | None) -> None:
    """Search the stages, microbatches, topology and rounds that train fastest with the given peers. Print
    them, and write them as a run file to `out`, which must not exist."""
    from peers.lab.planner.shape.shape_report import render
    from peers.lab.planner.shape.shape_search import search
    from peers.lab.planner.shape.writing import require_new, write

    if out is not None:
        require_new(out)
    best_shape = search(manifest, request)
    typer.echo(render(best_shape))
    if out is not None:
        write(best_shape, manifest, run_file, out)
        typer.echo(f"\nwrote  {out}")


def chaos(
    seed: Annotated[int, typer.Option(min=0, help="Seed of faults, their times and their victims.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Write a JSON report to this file.")] = None,
    seconds: Annotated[
        float, typer.Option(min=30, max=86400, help="Seconds of training with faults.")
    ] = 75.0,
    peers: Annotated[int, typer.Option(min=6, max=64, help="Peers that train.")] = 8,
    stages: Annotated[int, typer.Option(min=1, max=16, help="Pipeline stages.")] = 2,
    undisturbed: Annotated[
        int, typer.Option(min=0, max=16, help="Number of runs without faults, for comparison.")
    ] = 3,
    sharded: Annotated[bool, typer.Option("--sharded", help="Use a sharded reduction.")] = False,
    keep: Annotated[Path | None, typer.Option(help="Keep the peers' state in this folder.")] = None,
) -> None:
    """Kill half of a real swarm, freeze a peer, kill a p2pd, and compare with undisturbed runs."""
    if peers < 3 * stages:
        raise UserError(f"--peers {peers}: {stages} stages need three peers each, so that some can be killed")
    if report is not None and not report.absolute().parent.is_dir():
        raise UserError(f"--report {report}: its folder does not exist")
    from peers.lab.processes.chaos import ChaosOptions, run_chaos

    if keep is not None:
        require_free(keep, "--keep")
    folder = keep.absolute() if keep is not None else Path(tempfile.mkdtemp(prefix="swarmnet-chaos-"))
    options = ChaosOptions(seed, seconds, peers, stages, undisturbed, sharded, report, folder)
    raise typer.Exit(run_chaos(options))
