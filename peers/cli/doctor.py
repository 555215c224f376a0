"""The command `doctor`, which looks for problems."""

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
            help="Peer to check, running or not. [default: the running one, else a new peer]",
        ),
    ] = None,
    run: Annotated[str | None, typer.Option(help="Without a peer file: the run to join.")] = None,
    bootstrap: Bootstraps = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Run only this check, such as reachability. Repeatable.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    settings: Settings = None,
) -> None:
    """Show what keeps this machine from taking part, each with a fix. Exit code 1 if a check fails."""
    if peer_file is not None and (run is not None or bootstrap):
        raise UserError("a peer file already names run and bootstrap: leave --run and --bootstrap out")
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
            f"--only {only[0]}: needs a swarm: add --run RUN --bootstrap ADDRESS, or name a peer file"
        )
    must = not newcomer and config.role == "bootstrap"
    raise typer.Exit(run_doctor(config, must_be_reached=must, swarm=swarm, only=only or (), as_json=json))


def _newcomer(run: str | None, bootstrap: list[str] | None, settings: list[str] | None) -> PeerFile:
    """Return the configuration of a peer that `swarmnet join` would create here."""
    typed = Typed(
        "doctor", {"bootstrap": list(bootstrap or ())}, {("bootstrap",): "--bootstrap", ("run",): "--run"}
    )
    if run is not None:
        typed.data["run"] = run
    else:
        typed.data["role"] = "bootstrap"  # The only role that needs no run.
    wanted = overrides(settings)
    overlay(typed, {tuple(key.split(".")): (text, "--set") for key, text in wanted.items()})
    return check_typed(typed, Path().absolute(), _state_name(run), os.environ)


def _state_name(run: str | None) -> str:
    """Return the name of the state folder that `swarmnet join` uses for this run, which may have remembered
    peers."""
    if run is None:
        return "newcomer"
    if run_id_of(run):
        return run[:16]
    if not is_file(Path(run)):
        raise UserError(f"--run {run}: is neither a run id (64 hexadecimal digits) nor a published run file")
    from peers.config.run_file import RunFileError, load_signed

    with as_user_errors(RunFileError):
        return load_signed(Path(run)).run_id[:16]
