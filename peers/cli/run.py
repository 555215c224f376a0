"""The commands `run` and `demo`, which start peers, `lend`, which adds devices to one, and `publish`, which
signs a run.

The run's owner writes a run file, and `publish` signs it with the owner's key. The published file has the run
id (the hash of the run's description), by which other peers join.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peers.config.compute_file import ComputeFile, DeviceName
from peers.config.errors import ConfigError, UserError, as_user_errors
from peers.config.peer_file import DemoOptions, PeerFile, default_state, load, validate_peer_file
from peers.config.yaml_lines import ParsedYaml
from swarmnet.run.sync_methods import (
    COMMON_STEP_METHOD,
    DEFAULT_LOCAL_METHOD,
    METHOD_CONFIGS,
    PRESETS,
    MethodName,
)

if TYPE_CHECKING:
    from peers.config.run_file import SignedManifest
    from peers.process.role import Process, Role

Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Set one key, such as metrics.listen=off. Repeatable.")
]
Bootstraps = Annotated[
    list[str] | None,
    typer.Option("--bootstrap", help="Multiaddr of a peer to find others through. Repeatable."),
]
TEXT_LIMIT = 64 * 1024
"""Maximum characters of a file that an option names. Invites need less, and endless devices are cut."""


def warn(text: str) -> None:
    """Print a warning to standard error."""
    from peers.telemetry.console import shown

    typer.echo(shown(f"warning: {text}", sys.stderr), err=True)


def text_or_file(text: str | None) -> str | None:
    """Return the value of a command-line option; for `@FILE`, the content of the file. Raises UserError if
    the file cannot be read.

    All users of a machine can read arguments in its process list, so secrets are safer in files.
    """
    if text is None or not text.startswith("@"):
        return text
    try:
        with Path(text[1:]).open(encoding="utf-8") as file:
            return file.read(TEXT_LIMIT).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{text}: the file cannot be read: {error}") from None


InviteText = Annotated[
    str | None,
    typer.Option(
        "--invite",
        metavar="TEXT|@FILE",
        callback=text_or_file,
        help="Invite from the run's owner, if the run requires one. @FILE reads it from a file.",
    ),
]


def overrides(settings: Sequence[str] | None) -> dict[str, str]:
    """Return the `KEY=VALUE` texts of `--set` as a mapping. Raises ConfigError for another form."""
    values: dict[str, str] = {}
    for setting in settings or ():
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ConfigError([f"--set {setting}: expected KEY=VALUE, such as metrics.listen=off"])
        values[key] = value
    return values


def run(
    peer_file: Annotated[Path, typer.Argument(metavar="PEER.yaml", help="Peer file.")],
    settings: Settings = None,
) -> None:
    """Start one peer and keep it running. Ctrl+C leaves cleanly; a second one stops at once."""
    start(load(peer_file, os.environ, overrides(settings)))


def start(config: PeerFile, joined: Callable[[], str] = str) -> None:
    """Run a peer until it ends, and exit with its code. `joined` is called once a bootstrap has responded;
    it returns a notice for the user, empty for none."""
    from peers.process.process import run_peer_file  # Loads torch and hivemind.

    raise typer.Exit(run_peer_file(config, joined, create_role))


def lend(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="`compute.nodes.listen` of the peer file.")
    ],
    key: Annotated[Path, typer.Option(metavar="FILE", help="File with the secret of `compute.nodes.key`.")],
    device: Annotated[DeviceName, typer.Option(help="Kind of device to lend.")] = "auto",
    devices: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="How many. [default: all GPUs; on a CPU 1 process]"),
    ] = None,
) -> None:
    """Lend this machine's devices to a peer on another node of a private network, until Ctrl+C or SIGTERM.
    Tensors between nodes are not encrypted."""
    from peers.config.quantities import split_host_and_port

    try:
        host_and_port = split_host_and_port(address)
    except ValueError as error:
        raise UserError(f"HOST:PORT {error}") from None
    from peers.compute.devices.lending import Lender  # Loads torch.
    from peers.compute.devices.node_handshake import read_key
    from peers.compute.stage_part import device_of, devices_of

    lender = Lender(host_and_port, read_key(key), partial(typer.echo, err=True))
    lent = devices_of(ComputeFile(devices=devices or "all"), device_of(device))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda _number, _frame: lender.stopped.set())
    lender.run(lent)


def create_role(process: Process) -> Role:
    """Create the role that the peer file names. Only the module of that role is imported, so a bootstrap or
    an observer never loads torch (docs/benchmarks/start.md), unless the observer also scores the model."""
    match process.config.role:
        case "bootstrap":
            from peers.stageless.bootstrap_role import Bootstrap

            return Bootstrap(process)
        case "observer":
            from peers.stageless.observer.role import ObserverRole

            if not process.config.evaluating.seconds:
                return ObserverRole(process)
            from peers.tools.model.evaluator import SwarmEvaluator

            return ObserverRole(process, SwarmEvaluator(process))
        case "archivist":
            from peers.stageless.archivist.role import ArchivistRole

            return ArchivistRole(process)
        case _:
            from peers.worker.role import WorkerRole

            return WorkerRole(process)


def publish(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="Run file.")],
    key: Annotated[
        Path | None,
        typer.Option(
            help="The owner's identity file, created if missing. [default: owner.key in the state home]"
        ),
    ] = None,
    bootstrap: Bootstraps = None,
    out: Annotated[
        Path | None, typer.Option(help="File to write. [default: NAME.run.json in the same folder]")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The run's tokenizer.json. [default: next to RUN.yaml]"),
    ] = None,
    init_checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|URL",
            help="Initial model. A URL is fetched next to RUN.yaml. [default: next to RUN.yaml]",
        ),
    ] = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Sign without checking text and tokenizer.")
    ] = False,
    settings: Settings = None,
) -> None:
    """Sign a run and write its published file. Prints the run id and the command with which others join."""
    from peers.config import run_file as runs
    from peers.config.run_url import join_command
    from peers.data.documents import TextError
    from peers.tools.owner.run_check import check_run, counted_data, model_beside, start_beside
    from protocols.signed.identity import IdentityError, load_or_create
    from swarmnet.identifiers import PeerId

    set_options = overrides(settings)
    _require_valid_bootstraps(bootstrap)
    manifest = runs.load_manifest(run_file, PeerId(""), set_options)
    # All checks precede the owner's key, so that an invalid run file creates no key.
    for warning in check_run(run_file, manifest, tokenizer, opened=not unchecked):
        warn(warning)
    model_folder = model_beside(run_file, manifest, init_checkpoint, typer.echo)
    initial_model, model_warnings = start_beside(run_file, manifest, tokenizer, model_folder)
    for warning in model_warnings:
        warn(warning)
    with as_user_errors(TextError):
        data = None if unchecked else counted_data(manifest, run_file.parent, tokenizer)
    with as_user_errors(IdentityError):
        owner_key = (key or default_state(os.environ, sys.platform) / "owner.key").absolute()
        identity = load_or_create(owner_key)
    signed, path = runs.publish(run_file, identity, out, set_options, initial_model, bootstrap or (), data)
    through = " --bootstrap ".join(bootstrap or ["MULTIADDR"])
    _print_run(signed, owner_key, path)
    text_options = runs.text_settings(signed.manifest, run_file.parent, tokenizer)
    model_option = runs.initial_model_option(signed.manifest, run_file.parent, model_folder)
    typer.echo(f"first  swarmnet join {path} --bootstrap {through}{text_options}{model_option}")
    typer.echo(f"join   {join_command(signed.run_id, bootstrap or ['MULTIADDR'])}")
    shared = [source for source in signed.manifest.data.sources if source.is_shared]
    if shared:
        size = sum(source.file_bytes for source in shared)
        typer.echo(f"text   {size:,} bytes; peers send it to anyone (`shared: none` in a source stops that)")
    elif text_options:
        typer.echo("text   peers of the first stage name their copy of the text, as `first` does")
    if model_option:
        typer.echo(f"model  {signed.manifest.init_checkpoint.sha256}")
        typer.echo(
            "start  one peer of each stage, or an archivist, names its copy of the model, as `first` does"
        )


def _print_run(signed: SignedManifest, owner_key: Path, path: Path) -> None:
    """Print a published run: its id, owner, key file, published file, and the measured sizes of its text."""
    typer.echo(f"run    {signed.run_id}")
    typer.echo(f"owner  {signed.manifest.owner}")
    typer.echo(f"key    {owner_key}: keep a copy elsewhere; without it no orders can be given in this run")
    typer.echo(f"file   {path}")
    for source in signed.manifest.data.sources:
        if source.documents:
            typer.echo(f"size   {source.name}: {source.bytes:,} bytes in {source.documents:,} documents")


def _require_valid_bootstraps(bootstrap: Sequence[str] | None) -> None:
    """Raise ConfigError if an address of `--bootstrap` is invalid: check it as the key of a peer file."""
    typed = ParsedYaml("--bootstrap", {"role": "bootstrap", "state": ".", "bootstrap": list(bootstrap or ())})
    validate_peer_file(typed, Path(), "bootstrap", {})


def demo(
    peers: Annotated[int, typer.Option(min=1, max=64, help="Peers that train.")] = 6,
    stages: Annotated[int, typer.Option(min=1, max=64, help="Pipeline stages.")] = 3,
    seconds: Annotated[float, typer.Option(min=10, max=86400, help="How long to train.")] = 90.0,
    report: Annotated[Path | None, typer.Option(help="Write a JSON report to this file.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, text and the peer to kill.")] = 0,
    keep: Annotated[Path | None, typer.Option(help="Keep the peers' state in this folder.")] = None,
    method: Annotated[
        MethodName | None,
        typer.Option(
            help=f"sync.method. [default: {COMMON_STEP_METHOD}; with --experts {DEFAULT_LOCAL_METHOD}]"
        ),
    ] = None,
    sharded: Annotated[
        bool,
        typer.Option("--sharded", help="Set sync.topology: sharded-reduce."),
    ] = False,
    experts: Annotated[
        bool,
        typer.Option("--experts", help="Four experts per layer, of which a peer trains two."),
    ] = False,
    undisturbed: Annotated[bool, typer.Option("--undisturbed", help="Kill no peer and add none.")] = False,
) -> None:
    """Train a model with several peers on this machine: one is killed, one joins, and the model writes
    text."""
    if peers < stages:
        raise UserError(f"--peers {peers} cannot hold --stages {stages}; every stage needs a peer")
    if report is not None and not report.absolute().parent.is_dir():
        raise UserError(f"--report {report}: its folder does not exist")
    method = method or (DEFAULT_LOCAL_METHOD if experts else COMMON_STEP_METHOD)
    if experts and method not in PRESETS:
        raise UserError(f"--experts needs a local-step method: add --method with one of {', '.join(PRESETS)}")
    if sharded and not METHOD_CONFIGS[method].can_shard:
        raise UserError(f"--sharded does not work with {method}: add --method {DEFAULT_LOCAL_METHOD}")
    from peers.lab.processes.demo import run_demo

    options = DemoOptions(peers, stages, seconds, report, seed, keep, method, sharded, experts, undisturbed)
    raise typer.Exit(run_demo(options))
