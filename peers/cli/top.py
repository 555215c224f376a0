"""The commands `top`, which shows a running peer or all peers of a run in the terminal, and `curve`, which
shows how the loss fell."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from peers.config.errors import UserError
from peers.runtime.find_running import state_of


def top(
    state: Annotated[
        Path | None,
        typer.Argument(metavar="STATE", help="State folder or peer file of a running peer."),
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(help="Watch the swarm of this run (run id or published file) instead of a peer."),
    ] = None,
    bootstrap: Annotated[
        list[str] | None, typer.Option(help="Multiaddr of a peer to find the swarm through. Repeatable.")
    ] = None,
) -> None:
    """Watch a peer or a swarm live: stages, peers, rounds, loss, traffic and events. Without a terminal: one
    frame."""
    from rich.console import Console

    if state is not None and run is not None:
        raise UserError("a state folder and --run cannot be combined: name one of them")
    console = Console(highlight=False, markup=False, emoji=False)
    if run is not None:
        from peers.cli.connecting import with_run
        from peers.tools.top.live import swarm

        with_run(run, bootstrap, partial(swarm, console))
    else:
        from peers.tools.top.run_screen import peer

        peer(console, state_of(state, "top"))


def curve(
    states: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[STATE|PEER.yaml]...",
            help="State folders or peer files of peers or observers. [default: the only peer]",
        ),
    ] = None,
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write every point to this file.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="Draw all curves into this picture.")
    ] = None,
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write event files for TensorBoard.")
    ] = None,
) -> None:
    """Show how the loss fell: of a peer's microbatches, or of the whole run by an observer's log."""
    from peers.tools.curve import draw, read_curve, render, write_csv, write_tensorboard

    wheres: Sequence[Path | None] = states or [None]
    folders = [state_of(where, "curve", at_rest=True) for where in wheres]
    named = [folder.resolve() for folder in folders]
    names = [folder.name for folder in named]
    if len(set(names)) < len(names):  # Folders such as a/state and b/state.
        names = ["-".join(folder.parts[-2:]) for folder in named]
    curves = {name: read_curve(folder) for name, folder in zip(names, named, strict=True)}
    if len(curves) < len(named):
        raise UserError(f"two of the folders are called the same: {', '.join(names)}; name one at a time")
    for name, points in curves.items():
        typer.echo(render(name, points))
    if csv is not None:
        write_csv(csv, curves)
    if png is not None:
        draw(png, curves)
    if tensorboard is not None:
        write_tensorboard(tensorboard, curves)
    for written in (csv, png, tensorboard):
        if written is not None:
            typer.echo(f"wrote  {written}")
