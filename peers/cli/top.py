"""The command `top`: watch one running peer of this machine, or all peers of a run, in the terminal."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from peers.config.errors import UserError, as_user_errors
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
        _watch_swarm(console, run, bootstrap or ())
    else:
        from peers.tools.top.run_screen import peer

        peer(console, state_of(state, "top"))


def _watch_swarm(console: object, run: str, bootstraps: Sequence[str]) -> None:
    """Connect to a run and show its peers until the user stops. `run` is a run id or a published file."""
    from rich.console import Console

    from peers.cli.connecting import NOT_REACHED, notify, remembered_peers
    from peers.network.discovery.visitor_session import visit_run
    from peers.tools.top.live import swarm
    from protocols.errors import WireError

    assert isinstance(console, Console)
    cache = remembered_peers(run, bootstraps)

    async def connect_and_watch() -> None:
        async with visit_run(run, bootstraps, cache, notify) as connection:
            await swarm(console, connection)

    with as_user_errors(*NOT_REACHED, WireError):
        asyncio.run(connect_and_watch())
