"""Shared code of commands that contact a run through its peers: addresses of peers to dial, messages to the
user, and errors that the user can correct."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import typer

from peers.config.errors import NoAnswer, UserError, as_user_errors
from peers.config.peer_file import default_state, run_id_of
from peers.config.quantities import bootstrap_multiaddr
from peers.config.run_file import RunFileError, load_signed
from peers.config.run_url import parse_join_link
from peers.network.discovery.bootstrap import PeerCache
from peers.network.discovery.visitor_session import RunConnection, visit_run
from peers.telemetry.console import shown
from protocols.errors import CannotStart, WireError

Result = TypeVar("Result")

NOT_REACHED = (NoAnswer, RunFileError, CannotStart)
"""Errors that the user can correct."""


def notify(_event: str, text: str) -> None:
    """Print progress or a problem to standard error, so that standard output can be piped."""
    typer.echo(shown(text, sys.stderr), err=True)


def check_bootstraps(bootstraps: Sequence[str]) -> None:
    """Raise UserError if an address of `--bootstrap` is no multiaddr with a peer id."""
    with as_user_errors(ValueError):
        for address in bootstraps:
            bootstrap_multiaddr(address)


def remembered_peers(run: str, bootstraps: Sequence[str]) -> PeerCache:
    """Return the peer addresses that this machine saved when it took part in a run; empty if it never did.
    `run` is a run id or a published file. Raises UserError if an address in `bootstraps` is invalid, or if
    there is no address at all."""
    check_bootstraps(bootstraps)
    run_id = run_id_of(run) or load_signed(Path(run)).run_id
    cache = PeerCache(default_state(os.environ, sys.platform) / run_id[:16] / "peers.json")
    if not bootstraps and not cache.read():
        raise UserError("add --bootstrap MULTIADDR: this machine remembers no peer of that run")
    return cache


def with_run(
    run: str, bootstraps: Sequence[str] | None, work: Callable[[RunConnection], Awaitable[Result]]
) -> Result:
    """Connect to a run, and return the result of `work`. `run` is a run id, a published file or a join link.
    Raises UserError if the run is not reached, or the directory does not answer."""
    link = parse_join_link(run)
    if link is not None:
        run, bootstraps = link.run_id, [*link.addresses, *(bootstraps or ())]
    addresses = bootstraps or ()
    cache = remembered_peers(run, addresses)

    async def connect() -> Result:
        async with visit_run(run, addresses, cache, notify) as connection:
            return await work(connection)

    with as_user_errors(*NOT_REACHED, WireError):
        return asyncio.run(connect())
