"""The command that looks for what is wrong: doctor."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from peers.cli.run import Bootstraps, Settings, overrides
from peers.config.atomic_files import is_file
from peers.config.peer_file import PeerFile, check_typed, load, run_id_of
from peers.config.yaml_lines import Typed, overlay
from peers.errors import UserError, as_user_errors
from peers.runtime.find_running import peer_file_of, running_here


def doctor(
    peer_file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[STATE|PEER.yaml]",
            help="The peer to look at, running or not. [default: the one that runs, else a newcomer]",
        ),
    ] = None,
    run: Annotated[str | None, typer.Option(help="Without a peer file: the run, as for join.")] = None,
    bootstrap: Bootstraps = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this check, such as reachability. Repeatable.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document instead of lines.")] = False,
    settings: Settings = None,
) -> None:
    """What keeps this machine from taking part, each with the fix. Exit code 1 if something fails."""
    if peer_file is not None and (run is not None or bootstrap):
        raise UserError("either a peer file, or --run and --bootstrap; a peer file names both itself")
    newcomer = run is not None or bool(bootstrap) or (peer_file is None and not running_here())
    if newcomer:
        config = _newcomer(run, bootstrap, settings)
    else:
        config = load(peer_file_of(peer_file, "doctor"), os.environ, overrides(settings))
    from peers.tools.doctor.show import NETWORK, run_doctor, wanted_checks

    wanted = wanted_checks(only or ())
    swarm = not newcomer or run is not None or bool(config.bootstrap)
    if only and not swarm and not wanted - NETWORK:
        raise UserError(
            f"--only {only[0]}: is looked at in a swarm, and none is named: add --run RUN --bootstrap "
            "ADDRESS, or name a peer file"
        )
    must = not newcomer and config.role == "bootstrap"
    raise typer.Exit(run_doctor(config, must_be_reached=must, swarm=swarm, only=only or (), as_json=json))


def _newcomer(run: str | None, bootstrap: list[str] | None, settings: list[str] | None) -> PeerFile:
    """The peer that `swarmnet join` would make here."""
    typed = Typed(
        "doctor", {"bootstrap": list(bootstrap or ())}, {("bootstrap",): "--bootstrap", ("run",): "--run"}
    )
    if run is not None:
        typed.data["run"] = run
    else:
        typed.data["role"] = "bootstrap"  # the one role that needs no run
    wanted = overrides(settings)
    overlay(typed, {tuple(key.split(".")): (text, "--set") for key, text in wanted.items()})
    return check_typed(typed, Path().absolute(), _state_name(run), os.environ)


def _state_name(run: str | None) -> str:
    """Of the folder that `swarmnet join` takes for this run, where it has memories of it."""
    if run is None:
        return "newcomer"
    if run_id_of(run):
        return run[:16]
    if not is_file(Path(run)):
        raise UserError(f"--run {run}: is neither a run id (64 hexadecimal digits) nor a published run file")
    from peers.config.run_file import RunFileError, load_signed

    with as_user_errors(RunFileError):
        return load_signed(Path(run)).run_id[:16]
