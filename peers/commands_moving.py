"""The command that measures what moving between stages is worth: bench moving."""

from __future__ import annotations

from typing import Annotated

import typer


def bench_moving(
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
    from peers.bench_moving import HEADER, bench, describe, render
    from peers.preemptions import Climate

    climate = Climate(machines=machines, hours=hours, slowest_share=slowest)
    typer.echo(f"{describe(climate, seeds)}; fetching a stage takes {download:g} s\n")
    typer.echo(HEADER)
    for number in stages or [8]:
        for row in bench(climate, number, seeds, download):
            typer.echo(render(row))
