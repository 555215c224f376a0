"""Commands that start peers: run, publish, join, demo."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from peers.config.peer_file import DemoOptions, PeerFile, check_typed, default_state, load, run_id_of
from peers.config.yaml_lines import Typed, overlay
from peers.errors import ConfigError, UserError, as_user_errors
from peers.files import write_atomically
from swarmnet.identifiers import RunId

Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Set one key, as metrics.listen=off. Repeatable.")
]
Bootstraps = Annotated[
    list[str] | None,
    typer.Option("--bootstrap", help="Multiaddr of a peer to find others through. Repeatable."),
]


def overrides(settings: Sequence[str] | None) -> dict[str, str]:
    """`KEY=VALUE` texts as a map. Raises ConfigError."""
    found: dict[str, str] = {}
    for setting in settings or ():
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError([f"--set {setting}: expected KEY=VALUE, such as metrics.listen=off"])
        found[key] = value
    return found


def run(
    peer_file: Annotated[Path, typer.Argument(metavar="PEER.yaml", help="What to start.")],
    settings: Settings = None,
) -> None:
    """Start one peer and keep it running. Ctrl+C leaves politely, a second one at once."""
    _start(load(peer_file, os.environ, overrides(settings)))


def _start(config: PeerFile) -> None:
    from peers.peer import run_peer_file  # torch and hivemind

    raise typer.Exit(run_peer_file(config))


def publish(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run.")],
    key: Annotated[
        Path | None,
        typer.Option(help="The owner's identity file, made if missing. [default: owner.key among states]"),
    ] = None,
    bootstrap: Bootstraps = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write. [default: NAME.run.json beside it]")
    ] = None,
    settings: Settings = None,
) -> None:
    """Sign a run and write its published file; prints the run id and the line with which others join."""
    from peers import run_file as runs
    from protocols.identity import IdentityError, load_or_create
    from swarmnet.identifiers import PeerId

    wanted = overrides(settings)
    _checked_bootstraps(bootstrap)
    runs.load_manifest(run_file, PeerId(""), wanted)  # no key is made for a file with mistakes in it
    with as_user_errors(IdentityError):
        identity = load_or_create(key or default_state(os.environ, sys.platform) / "owner.key")
    signed, path = runs.publish(run_file, identity, out, wanted)
    line = " ".join(f"--bootstrap {address}" for address in bootstrap or ["MULTIADDR"])
    typer.echo(f"run    {signed.run_id}")
    typer.echo(f"owner  {signed.manifest.owner}")
    typer.echo(f"file   {path}")
    typer.echo(f"first  swarmnet join {path} {line}")
    typer.echo(f"join   swarmnet join {signed.run_id} {line}")


def _checked_bootstraps(bootstrap: Sequence[str] | None) -> None:
    typed = Typed("--bootstrap", {"role": "bootstrap", "state": ".", "bootstrap": list(bootstrap or ())})
    check_typed(typed, Path(), "bootstrap", {})


def join(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run id, or a published run file.")],
    bootstrap: Bootstraps = None,
    stage: Annotated[str, typer.Option(help="The stage to hold; auto: where it helps most.")] = "auto",
    state: Annotated[
        Path | None, typer.Option(help="Folder of this peer. [default: the run's, among states]")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Shown to people.")] = None,
    settings: Settings = None,
) -> None:
    """Take part in a run: writes peer.yaml into the state folder, then runs it. Again: goes on with it."""
    from peers.run_file import load_signed, published_text

    if not run_id_of(run) and not Path(run).exists() and Path(run).suffix != ".json":
        raise UserError(
            f"{run} is neither a run id (64 hexadecimal digits, lower case) nor a published run file; "
            "whoever published the run can tell you either"
        )
    signed = None if run_id_of(run) else load_signed(Path(run))
    run_id = signed.run_id if signed else RunId(run)
    folder = (state or default_state(os.environ, sys.platform) / run_id[:16]).absolute()
    file = folder / "peer.yaml"
    data: dict[str, object] = {"bootstrap": list(bootstrap or ()), "stage": _plain(stage)}
    if name is not None:
        data["name"] = name
    wanted = overrides(settings)
    if file.exists():
        given = {key: json.dumps(value) for key, value in data.items() if value not in ([], "auto")}
        _start(_again(file, run_id, {**given, **wanted}))
    data = {"run": run_id, "state": ".", **data}
    typed = Typed("join", dict(data), {(key,): f"--{key}" for key in data})
    overlay(typed, {tuple(key.split(".")): (text, "--set") for key, text in wanted.items()})
    check_typed(typed, folder, name or run_id[:16], os.environ)
    if signed is not None:
        write_atomically(folder / "run.json", published_text(signed).encode())
        typed.data["run"] = "run.json"
    write_atomically(file, _peer_yaml(typed.data).encode())
    typer.echo(f"wrote  {file}", err=True)
    _start(load(file, os.environ))


def _plain(stage: str) -> int | str:
    return int(stage) if stage.isdecimal() else stage


def _again(file: Path, run_id: RunId, wanted: dict[str, str]) -> PeerFile:
    """The peer file of an earlier `join`, with what this command says over it."""
    from peers.run_file import load_signed

    config = load(file, os.environ, wanted)
    if config.run is None:
        raise UserError(f"{file} is of a {config.role}; name another folder with --state")
    held = run_id_of(config.run) or load_signed(Path(config.run)).run_id
    if held != run_id:
        raise UserError(f"{file} is for run {held}; name another folder with --state")
    return config


def _peer_yaml(data: dict[str, object]) -> str:
    """A peer file for people: JSON's values are YAML's."""
    lines = ["# Written by `swarmnet join`; yours to edit. All keys: swarmnet config explain"]
    lines += [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in data.items()]
    return "\n".join(lines) + "\n"


def demo(
    peers: Annotated[int, typer.Option(min=1, max=64, help="Peers that train.")] = 6,
    stages: Annotated[int, typer.Option(min=1, max=64, help="Stages the model is cut in.")] = 3,
    seconds: Annotated[float, typer.Option(min=5, max=86400, help="How long to train.")] = 90.0,
    report: Annotated[Path | None, typer.Option(help="Write the JSON report here.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Chooses weights, text and who is killed.")] = 0,
    keep: Annotated[Path | None, typer.Option(help="Keep the peers' folders here.")] = None,
) -> None:
    """Several peers train a model on this machine: one is killed, one joins, and the model writes text."""
    if peers < stages:
        raise UserError(f"--peers {peers} cannot hold --stages {stages}; every stage needs a peer")
    if report is not None and not report.absolute().parent.is_dir():
        raise UserError(f"--report {report}: its folder does not exist")
    from peers.demo.show import run_demo

    raise typer.Exit(run_demo(DemoOptions(peers, stages, seconds, report, seed, keep)))
