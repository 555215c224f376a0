"""The command that measures what skipping stages is worth: bench paths."""

from __future__ import annotations

from typing import Annotated

import typer

WIDTH = 200
"""Columns of the table: it does not fit in fewer."""


def bench_paths(
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Topologies.")] = 3,
    memory: Annotated[
        list[int] | None, typer.Option(min=1, max=64, help="Microbatches per peer. Repeatable. [default: 3]")
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="Of the search for the best full pipeline.")] = 20_000,
    placed: Annotated[bool, typer.Option(help="Lay the stages out for the full pipeline.")] = False,
) -> None:
    """Skipping a third of the stages on a map of 12 cities, beside the best full pipeline that is found."""
    from rich.console import Console

    from peers.bench_paths import bench, render

    for number in memory or [3]:
        Console(width=WIDTH).print(render(bench(range(seeds), number, steps, placed)))
