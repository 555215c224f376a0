"""The command `top`: watch one running peer of this machine, or all peers of a run, in the terminal."""

from __future__ import annotations

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
