"""What every command does that reaches a run from outside: where to enter, what to say, what can go wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from peers.config.peer_file import default_state, run_id_of
from peers.config.quantities import bootstrap_multiaddr
from peers.config.run_file import RunFileError, load_signed
from peers.errors import NoAnswer, UserError, as_user_errors
from peers.network.discovery.bootstrap import PeerCache
from peers.telemetry.console import shown
from protocols.errors import CannotStart

NOT_REACHED = (NoAnswer, RunFileError, CannotStart)
"""What a person can mend."""


def notify(_event: str, text: str) -> None:
    """Progress and trouble go to standard error, so that the text can be piped."""
    typer.echo(shown(text, sys.stderr), err=True)


def check_bootstraps(bootstraps: Sequence[str]) -> None:
    """UserError where one is no address, before anybody is asked."""
    with as_user_errors(ValueError):
        for address in bootstraps:
            bootstrap_multiaddr(address)


def ways_in(run: str, bootstraps: Sequence[str]) -> PeerCache:
    """The peers that this machine remembers of the run, if it took part. UserError without any way in."""
    check_bootstraps(bootstraps)
    run_id = run_id_of(run) or load_signed(Path(run)).run_id
    cache = PeerCache(default_state(os.environ, sys.platform) / run_id[:16] / "peers.json")
    if not bootstraps and not cache.read():
        raise UserError("name a way in: --bootstrap MULTIADDR; this machine remembers no peer of that run")
    return cache
