"""The command that tells what a swarm could carry: plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from peers.errors import UserError


def plan(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run.")],
    peers: Annotated[
        str,
        typer.Option(
            help="Classes of peers, COUNTxSPEED@DOWN/UP with commas: tokens per second of the whole model on "
            "one of them, Mbit/s; :REGION with --links. 9000x500tps@100/20,1000x20ktps@1000/1000. "
            "No speed: as this machine."
        ),
    ],
    churn: Annotated[float, typer.Option(min=0, max=100, help="Share of peers that leave per hour.")] = 0.0,
    latency: Annotated[
        str | None, typer.Option(help="One way between two peers, from-to. [default: 5ms-150ms]")
    ] = None,
    links: Annotated[
        Path | None, typer.Option(metavar="LINKS.yaml", help="Instead: a table of regions and their links.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Target. [default: the decay's end]")] = None,
    cores: Annotated[int, typer.Option(min=0, help="All peers share so many; 0: each has its own.")] = 0,
    slots: Annotated[int, typer.Option(min=1, max=1024, help="And in_flight, of the peer files.")] = 32,
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine's compute first.")] = False,
    simulate: Annotated[
        int, typer.Option(min=0, max=100_000, help="So many peers; 0: as many as a minute is enough for.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Of the simulation.")] = 0,
) -> None:
    """What given peers would make of a run: tokens/s, days, bytes, the weakest stage, the price of churn."""
    from peers.capacity import links as tables
    from peers.capacity.measure import measured
    from peers.capacity.plan import plan as answer
    from peers.capacity.question import Question
    from peers.capacity.report import render
    from peers.capacity.speeds import peer_classes
    from peers.run_file import load_manifest
    from swarmnet.identifiers import PeerId

    if links is not None and latency is not None:
        raise UserError("--links says what lies between peers: leave --latency out")
    table = tables.load(links) if links is not None else None
    try:
        classes = peer_classes(peers, table.lines if table is not None else None)
        between = tables.seconds_range(latency or "5ms-150ms")
    except ValueError as error:
        raise UserError(f"--peers or --latency: {error}") from None
    manifest = load_manifest(run_file, PeerId(""), {})
    machine = measured(manifest) if measure else None
    if machine is not None:
        costs = zip(machine.alone, machine.per_peer, strict=True)
        each = ", ".join(f"{1000 * alone:.1f} + {1000 * more:.1f} per further peer" for alone, more in costs)
        typer.echo(f"measured: a microbatch costs {each} ms of a core, by stage")
    question = Question(
        classes, between, churn, tokens, cores, machine, slots, simulated=simulate, seed=seed, links=table
    )
    typer.echo(render(answer(manifest, question)))
