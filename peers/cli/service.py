"""Commands `service install`, `uninstall` and `status`: a peer that starts with the machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from peers.config.atomic_files import is_file
from peers.config.peer_file import load
from peers.errors import UserError
from peers.runtime.find_running import peer_file_of
from peers.tools import systemd_unit as units

PeerFileArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="[STATE|PEER.yaml]", help="A peer's folder or peer file. [default: the one that runs]"
    ),
]


def install(peer_file: PeerFileArgument = None) -> None:
    """Write a systemd user unit for a peer file, and start it."""
    _tell(units.install(_service(peer_file, "install")))


def uninstall(peer_file: PeerFileArgument = None) -> None:
    """Stop the unit and remove it. What the peer has on disk stays."""
    _tell(units.uninstall(_service(peer_file, "uninstall")))


def status(peer_file: PeerFileArgument = None) -> None:
    """Say whether the unit is there and runs."""
    for line in units.status(_service(peer_file, "status")):
        typer.echo(line)


def _tell(done: units.Done) -> None:
    for line in done.lines:
        typer.echo(line)
    if not done.ok:
        raise typer.Exit(1)


def _service(peer_file: Path | None, verb: str) -> units.Service:
    """Nothing is written for a file with mistakes, or on a system without systemd."""
    units.needs_systemd()
    file = peer_file_of(peer_file, f"service {verb}")
    if not is_file(file):
        raise UserError(
            f"{file}: no such file; name the peer file, as in: swarmnet service {verb} PEER.yaml"
        )
    script = Path(sys.executable).with_name("swarmnet")
    program = [str(script)] if script.is_file() else [sys.executable, "-m", "peers.cli.main"]
    return units.service_of(file, load(file, os.environ), program, units.unit_home(os.environ))
