"""The command `doctor`: check whether this machine can take part in a run, as the peer of a peer file or as
a new one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from peers.cli.run import Bootstraps, Settings, overrides
from peers.config.atomic_files import is_file
from peers.config.errors import UserError, as_user_errors
from peers.config.peer_file import PeerFile, load, run_id_of, validate_peer_file
from peers.config.yaml_lines import ParsedYaml, override_values
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
    is_newcomer = run is not None or bool(bootstrap) or (peer_file is None and not running_here())
    if is_newcomer:
        config = _newcomer_config(run, bootstrap, settings)
    else:
        config = load(peer_file_of(peer_file, "doctor"), os.environ, overrides(settings))
    from peers.tools.doctor.print_checks import NETWORK, run_doctor, wanted_checks

    checks = wanted_checks(only or ())
    can_reach_swarm = not is_newcomer or run is not None or bool(config.bootstrap)
    all_need_swarm = not checks - NETWORK
    if only and not can_reach_swarm and all_need_swarm:
        raise UserError(
            f"--only {only[0]}: needs a swarm: add --run RUN --bootstrap ADDRESS, or name a peer file"
        )
    must_be_reached = not is_newcomer and config.role == "bootstrap"
    exit_code = run_doctor(
        config, must_be_reached=must_be_reached, swarm=can_reach_swarm, only=only or (), as_json=json
    )
    raise typer.Exit(exit_code)


def _newcomer_config(run: str | None, bootstrap: list[str] | None, settings: list[str] | None) -> PeerFile:
    """Return the configuration that `swarmnet join` would create for a new peer. Raises ConfigError."""
    typed = ParsedYaml(
        origin="doctor",
        data={"bootstrap": list(bootstrap or ())},
        places={("bootstrap",): "--bootstrap", ("run",): "--run"},
    )
    if run is not None:
        typed.data["run"] = run
    else:
        typed.data["role"] = "bootstrap"  # The only role that needs no run.
    set_options = overrides(settings)
    override_values(typed, {tuple(key.split(".")): (text, "--set") for key, text in set_options.items()})
    return validate_peer_file(typed, Path().absolute(), _state_name(run), os.environ)


def _state_name(run: str | None) -> str:
    """Return the name of the state folder that `swarmnet join` uses for a run: the start of the run id. The
    folder may have addresses of peers from an earlier join. Raises UserError if there is no such run file."""
    if run is None:
        return "newcomer"
    if run_id_of(run):
        return run[:16]
    if not is_file(Path(run)):
        raise UserError(f"--run {run}: is neither a run id (64 hexadecimal digits) nor a published run file")
    from peers.config.run_file import RunFileError, load_signed

    with as_user_errors(RunFileError):
        return load_signed(Path(run)).run_id[:16]
