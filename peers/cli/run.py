"""Commands that start peers: run, publish, join, demo."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peers.config.peer_file import DemoOptions, PeerFile, check_typed, default_state, load
from peers.config.yaml_lines import Typed
from peers.errors import ConfigError, UserError, as_user_errors
from swarmnet.run.local_steps import PRESETS
from swarmnet.run.manifest import MethodName

if TYPE_CHECKING:
    from peers.config.run_file import SignedManifest
    from peers.role import Process, Role

Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Set one key, as metrics.listen=off. Repeatable.")
]
Bootstraps = Annotated[
    list[str] | None,
    typer.Option("--bootstrap", help="Multiaddr of a peer to find others through. Repeatable."),
]
TEXT_LIMIT = 64 * 1024
"""Characters of a file that an option names: invites of a hundred stages, and no device without an end."""


def text_or_file(text: str | None) -> str | None:
    """The text of an option, or for `@FILE` the text in that file: all users of a machine can read arguments
    in its process list. Raises UserError where the file cannot be read."""
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
        "--invite", metavar="TEXT|@FILE", callback=text_or_file,
        help="From the run's owner, where it asks for one. @FILE reads it from a file.",
    ),
]  # fmt: skip


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
    start(load(peer_file, os.environ, overrides(settings)))


def start(config: PeerFile, joined: Callable[[], str] = str) -> None:
    from peers.process.process import run_peer_file  # torch and hivemind

    others = {"observer": _evaluating_observer} if config.evaluating.seconds else {}
    raise typer.Exit(run_peer_file(config, joined, others))


def _evaluating_observer(process: Process) -> Role:
    """Evaluating visits as `swarmnet evaluate` does and loads torch, so it stands above the process."""
    from peers.observer.role import ObserverRole
    from peers.tools.model.evaluator import SwarmEvaluator

    return ObserverRole(process, SwarmEvaluator(process))


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
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The run's tokenizer.json. [default: beside RUN.yaml]")
    ] = None,
    start: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|URL",
            help="The model that the run starts from; a URL's is fetched beside RUN.yaml. [default: there]",
        ),
    ] = None,
    unchecked: Annotated[
        bool, typer.Option("--unchecked", help="Sign without opening text and tokenizer here.")
    ] = False,
    settings: Settings = None,
) -> None:
    """Sign a run and write its published file; prints the run id and the line with which others join."""
    from peers.cli.model import warn
    from peers.config import run_file as runs
    from peers.data.documents import TextError
    from peers.tools.owner.run_check import check_run, counted_sources, model_beside, start_beside
    from protocols.signed.identity import IdentityError, load_or_create
    from swarmnet.identifiers import PeerId

    wanted = overrides(settings)
    _checked_bootstraps(bootstrap)
    manifest = runs.load_manifest(run_file, PeerId(""), wanted)
    # Here, for no key is made for a file with mistakes in it.
    for unusual in check_run(run_file, manifest, tokenizer, opened=not unchecked):
        warn(unusual)
    model = model_beside(run_file, manifest, start, typer.echo)
    begins, unlike = start_beside(run_file, manifest, tokenizer, model)
    for unusual in unlike:
        warn(unusual)
    with as_user_errors(TextError):
        counted = () if unchecked else counted_sources(manifest, run_file.parent)
    with as_user_errors(IdentityError):
        owner_key = (key or default_state(os.environ, sys.platform) / "owner.key").absolute()
        identity = load_or_create(owner_key)
    signed, path = runs.publish(run_file, identity, out, wanted, begins, bootstrap or (), counted)
    through = " --bootstrap ".join(bootstrap or ["MULTIADDR"])
    _print_run(signed, owner_key, path)
    text = runs.text_settings(signed.manifest, run_file.parent, tokenizer)
    begin = runs.start_setting(signed.manifest, run_file.parent, model)
    typer.echo(f"first  swarmnet join {path} --bootstrap {through}{text}{begin}")
    typer.echo(f"join   swarmnet join {signed.run_id} --bootstrap {through}")
    if text:
        typer.echo("text   whoever may hold the first stage says where their copy is, as `first` does")
    if begin:
        typer.echo(f"model  {signed.manifest.init_checkpoint.sha256}")
        typer.echo("start  one peer of each stage or an archivist says where the model is, as `first` does")


def _print_run(signed: SignedManifest, owner_key: Path, path: Path) -> None:
    """Print what was published, and where it lies."""
    typer.echo(f"run    {signed.run_id}")
    typer.echo(f"owner  {signed.manifest.owner}")
    typer.echo(f"key    {owner_key}: keep a copy elsewhere; without it nobody can give orders in this run")
    typer.echo(f"file   {path}")
    for source in signed.manifest.data.sources:
        if source.documents:
            typer.echo(f"size   {source.name}: {source.bytes:,} bytes in {source.documents:,} documents")


def _checked_bootstraps(bootstrap: Sequence[str] | None) -> None:
    typed = Typed("--bootstrap", {"role": "bootstrap", "state": ".", "bootstrap": list(bootstrap or ())})
    check_typed(typed, Path(), "bootstrap", {})


def demo(
    peers: Annotated[int, typer.Option(min=1, max=64, help="Peers that train.")] = 6,
    stages: Annotated[int, typer.Option(min=1, max=64, help="Stages the model is cut in.")] = 3,
    seconds: Annotated[float, typer.Option(min=10, max=86400, help="How long to train.")] = 90.0,
    report: Annotated[Path | None, typer.Option(help="Write the JSON report here.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Chooses weights, text and who is killed.")] = 0,
    keep: Annotated[Path | None, typer.Option(help="Keep the peers' folders here.")] = None,
    method: Annotated[
        MethodName | None,
        typer.Option(help="How its peers learn together. [default: demo-sign; with --experts local-steps]"),
    ] = None,
    sharded: Annotated[
        bool,
        typer.Option("--sharded", help="Where peers step by themselves: they exchange through reducers."),
    ] = False,
    experts: Annotated[
        bool,
        typer.Option("--experts", help="Each layer has four experts; a peer trains two and has all."),
    ] = False,
    undisturbed: Annotated[
        bool, typer.Option("--undisturbed", help="Nobody is killed, and nobody joins.")
    ] = False,
) -> None:
    """Several peers train a model on this machine: one is killed, one joins, and the model writes text."""
    if peers < stages:
        raise UserError(f"--peers {peers} cannot hold --stages {stages}; every stage needs a peer")
    if report is not None and not report.absolute().parent.is_dir():
        raise UserError(f"--report {report}: its folder does not exist")
    method = method or ("local-steps" if experts else "demo-sign")
    if experts and method not in PRESETS:
        raise UserError("--experts: goes with a --method whose peers step by themselves, as local-steps")
    if sharded and method not in PRESETS:
        raise UserError(
            "--sharded: only what peers that step by themselves contribute can be sharded; add "
            "--method local-steps"
        )
    from peers.lab.processes.demo import run_demo

    options = DemoOptions(peers, stages, seconds, report, seed, keep, method, sharded, experts, undisturbed)
    raise typer.Exit(run_demo(options))
