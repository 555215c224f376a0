"""The command `host`: publish a run and start all that it needs on this machine."""

from __future__ import annotations

import asyncio
import shlex
from pathlib import Path
from typing import Annotated

import typer

from peers.cli.run import publish
from peers.config.atomic_files import is_file
from peers.config.errors import UserError, as_user_errors


def host(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="Run file.")],
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST[:PORT]",
            help="Where others reach this machine. [default: its address in the local network, port 31330]",
        ),
    ] = None,
    page: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the run's page; 0.0.0.0:9420 is public.")
    ] = "127.0.0.1:9420",
    peers: Annotated[
        int, typer.Option(min=0, max=64, help="Peers that train here; each holds one stage.")
    ] = 1,
) -> None:
    """Publish a run and keep a bootstrap, its page, an archive and the first peers running. A later call
    continues with them."""
    from peers.config.run_file import initial_model_option, load_manifest, load_signed, text_settings
    from peers.lab.planner.new_run.machines import bootstrap_place
    from peers.runtime.state_lock import make_private
    from peers.tools.owner.hosting import (
        ANY_ADDRESS,
        HELD_OUT,
        HostPlan,
        found_by_commands,
        host_until_stopped,
        listen_place,
        scoring_keys,
    )
    from protocols.signed.identity import IdentityError
    from swarmnet.identifiers import PeerId

    manifest = load_manifest(run_file, PeerId(""))
    place, port = bootstrap_place(address)
    listen = ANY_ADDRESS if address is None else listen_place(place)
    folder = run_file.absolute().parent / f"{run_file.stem}-host"
    published = run_file.absolute().with_suffix(".run.json")
    plan = HostPlan(
        folder=folder,
        published=published,
        address=place,
        port=port,
        page=page,
        peers=peers,
        listen=listen,
        is_announced=address is not None and listen != place,
    )
    make_private(folder)
    with as_user_errors(IdentityError):
        multiaddr = plan.multiaddr()
    if is_file(published):
        typer.echo(f"file   {published}, signed before: changes of {run_file.name} since then do not count")
    else:
        publish(run_file, bootstrap=[multiaddr], out=published)
    signed = load_signed(published)
    if signed.manifest.name != manifest.name:
        raise UserError(f"{published} is of another run, {signed.manifest.name}; move it elsewhere")
    options = text_settings(manifest, run_file.parent) + initial_model_option(manifest, run_file.parent)
    scoring = scoring_keys(signed.manifest, run_file.parent)
    parts = plan.write(signed.manifest, shlex.split(options), scoring)
    typer.echo(f"files  {folder}")
    typer.echo(f"page   http://{page}")
    if peers:
        typer.echo(f"watch  swarmnet top {folder / 'peer-1'}")
    if not scoring:
        typer.echo(
            f"       without a held-out loss; for one, put text that the run lacks beside {run_file.name} "
            f"({HELD_OUT}.txt), and delete {folder / 'observer.yaml'}"
        )
    typer.echo("stop   Ctrl+C: all leave; the same command continues")
    with found_by_commands(plan):
        asyncio.run(host_until_stopped(parts, lambda line: typer.echo(line, err=True)))
