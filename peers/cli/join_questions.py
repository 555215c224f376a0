"""What `swarmnet join` asks a person at a terminal before this computer takes part: a name, and one yes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from peers.config.errors import UserError
from peers.config.peer_file import PeerFile

if TYPE_CHECKING:
    from peers.config.run_file import SignedManifest
    from peers.network.discovery.visitor_session import RunConnection
    from protocols.signed.peer_record import PeerRecord

CHANGE_LATER = "later     `swarmnet limit` changes the limits, `swarmnet pause` and `swarmnet leave` stop it"


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run as its peers describe it; neither manifest nor records if none was reached."""

    signed: SignedManifest | None = None
    records: tuple[PeerRecord, ...] = ()


def is_interactive() -> bool:
    """Return whether a person can answer: input and messages are on a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask_name() -> str | None:
    """Return the name that the person types; None if it is left empty."""
    name = typer.prompt(
        "Your name on the swarm's page, visible to everyone (Enter: none)",
        default="",
        show_default=False,
        err=True,
    )
    return str(name).strip() or None


def ask_consent(config: PeerFile, run: str, signed: SignedManifest | None) -> SignedManifest | None:
    """Show what joining means, and ask once. `run` is a run id or a published file; `signed` is None if only
    the id is known. Returns the run, if it was known or could be reached. Raises typer.Abort if the answer is
    no, and UserError if this computer lacks a device that the peer file names."""
    from peers.telemetry.console import shown
    from peers.worker.watch.join_summary import summarize  # Loads torch.

    found = _find(run, config.bootstrap)
    signed = signed or found.signed
    for line in (*summarize(config, signed, found.records), CHANGE_LATER):
        typer.echo(shown(line, sys.stderr), err=True)
    typer.confirm("Join?", default=True, abort=True, err=True)
    return signed


def _find(run: str, bootstraps: Sequence[str]) -> FoundRun:
    """Return the run and its peers' records, or neither if no peer answers: the peer itself tries longer."""
    from peers.cli.connecting import with_run
    from peers.network.discovery.record_reader import look

    async def fetch(connection: RunConnection) -> FoundRun:
        signed = connection.signed
        records = await look(connection.directory, signed.run_id, len(signed.manifest.stages))
        return FoundRun(signed, tuple(each.record for each in records.values()))

    if not bootstraps:
        return FoundRun()
    try:
        return with_run(run, bootstraps, fetch)
    except UserError as error:
        typer.echo(f"the run does not answer now: {error}", err=True)
        return FoundRun()
