"""The command `join`: turn a run file, a URL or a run id into a peer file, and start the peer."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peers.cli.run import Bootstraps, InviteText, Settings, overrides, start
from peers.config.atomic_files import is_file, is_there, write_atomically
from peers.config.peer_file import PeerFile, check_typed, default_state, load, run_id_of
from peers.config.rewriting import set_private
from peers.config.yaml_lines import Typed, overlay
from peers.errors import UnknownRun, UserError, as_user_errors
from peers.runtime.find_running import PEER_FILE, states_here
from swarmnet.identifiers import RUN_DIGITS, RunId

if TYPE_CHECKING:
    from peers.config.run_file import SignedManifest

MEANINGS = {
    "run": "the run to join",
    "state": "the folder of this file: identity, checkpoints, receipts",
    "bootstrap": "peers through which to find others",
    "stage": "auto: the one that needs a peer most",
    "name": "shown on the swarm's page",
    "archive": "where to start from if no peer is online",
    "invite": "from the run's owner",
}
"""Comments above the keys of the peer file that `join` writes."""
ANSWERED = "bootstraps.json"
"""File next to the peer file with the bootstraps that responded, in the format of a PeerCache."""
MAX_STAGE_DIGITS = 5
"""Maximum digits of a stage, as in the names of archived checkpoints (`peers/state/archive.py`)."""
NAME_CHARACTERS = 6
"""Characters at the end of a peer id that are its default name: 38 thousand million different ones."""


def join(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="A run id, a published run file, or its URL.")
    ] = None,
    bootstrap: Bootstraps = None,
    stage: Annotated[
        str, typer.Option(help="Stage to train. auto: the one that needs a peer most.")
    ] = "auto",
    state: Annotated[
        Path | None, typer.Option(help="State folder of this peer. [default: by run id, in the state home]")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of this peer, shown to people.")] = None,
    invite: InviteText = None,
    from_archive: Annotated[
        str | None,
        typer.Option(help="Folder or URL of the run's archive: start from it if no peer is online."),
    ] = None,
    alone: Annotated[
        bool, typer.Option("--alone", help="Start without the address of another peer, and wait.")
    ] = False,
    settings: Settings = None,
) -> None:
    """Join a run: write peer.yaml into the state folder and start the peer. A later call continues with
    it."""
    from peers.runtime.state_lock import make_private

    if run is None and from_archive is None:
        run, state = _resumed(state)
    known = RunId(_whole_id(run or "", state).rpartition("#")[2])
    if not is_there(_folder(state, known) / PEER_FILE) or not run_id_of(known):
        known = RunId("")  # A URL without a known run id must be fetched.
    signed = None if known else _named(run, from_archive)
    run_id = signed.run_id if signed is not None else known or RunId(run or "")
    folder = _folder(state, run_id)
    file = folder / PEER_FILE
    data: dict[str, object] = {"bootstrap": list(bootstrap or ()), "stage": _plain(stage)}
    if from_archive is not None:
        data["archive"] = from_archive if "://" in from_archive else str(Path(from_archive).absolute())
    optional = {"name": name, "invite": invite}
    data |= {key: value for key, value in optional.items() if value is not None}
    wanted = overrides(settings)
    if is_there(file):
        given = {key: json.dumps(value) for key, value in data.items() if value not in ([], "auto")}
        _start_again(file, run_id, {**given, **wanted}, invite)
    if not bootstrap and signed is not None and run is not None:
        data["bootstrap"] = list(signed.bootstraps)
    data = {"run": run_id, "state": ".", **data}
    typed = Typed("join", dict(data), {(key,): f"--{key}" for key in data})
    overlay(typed, {tuple(key.split(".")): (text, "--set") for key, text in wanted.items()})
    named = "name" in typed.data
    config = check_typed(typed, folder, run_id[:16], os.environ)
    if signed is not None:
        _require_possible(config, signed)
    if not (config.bootstrap or from_archive is not None or alone or config.lan is True):
        raise UserError(_no_address(signed))
    is_new = not is_there(folder)
    make_private(folder)
    if not named:
        typed.data["name"] = _own_name(config)
    _write(file, typed, signed)
    if not typed.data.get("bootstrap") and from_archive is None:
        typer.echo(
            "alone  this peer knows no address of another one: it waits until others dial it", err=True
        )
    typer.echo("start  Ctrl+C leaves politely (again: at once); `swarmnet top` shows more", err=True)
    _start_first(file, is_new)


def _start_again(file: Path, run_id: RunId, wanted: dict[str, str], invite: str | None) -> None:
    """Start the peer of an earlier `join`. The options of this command apply only once, except for an invite,
    which is saved."""
    config = _again(file, run_id, wanted)
    if invite and set_private(file, "invite", invite, MEANINGS["invite"]):
        typer.echo(f"wrote  the invite into {file}: it is used at every start from now on", err=True)
    start(config, _keeping(file, config.bootstrap))


def _write(file: Path, typed: Typed, signed: SignedManifest | None) -> None:
    """Write the peer file, and next to it the run if it is known. Raises UserError."""
    from peers.config.run_file import published_text

    if signed is not None:
        write_atomically(file.with_name("run.json"), published_text(signed).encode())
        typed.data["run"] = "run.json"
    write_atomically(
        file, peer_yaml(typed.data).encode(), private=True
    )  # It may contain an invite or a password.
    typer.echo(f"wrote  {file}   yours to edit; `swarmnet config explain` has all keys", err=True)


def _only_state() -> Path | None:
    """Return the state folder of the only peer that joined here, or None. Raises UserError, which lists them,
    if there are several."""
    there = [state for state in states_here() if is_there(state / PEER_FILE)]
    if len(there) > 1:
        commands = ", ".join(f"`swarmnet join --state {shlex.quote(str(state))}`" for state in there)
        raise UserError(f"{len(there)} peers have joined on this computer; resume one: {commands}")
    return there[0] if there else None


def _resumed(state: Path | None) -> tuple[str | None, Path | None]:
    """Return the run and the state folder of the peer that joined here, in `state` if given. The run is None
    if there is no such peer. Raises UserError."""
    from peers.config.run_file import load_signed

    state = state or _only_state()
    if state is None or not is_there(state / PEER_FILE):
        return None, state
    config = load(state / PEER_FILE, os.environ)
    if config.run is None:
        raise UserError(
            f"{state / PEER_FILE} is of a {config.role}; start it with `swarmnet run {state / PEER_FILE}`"
        )
    return run_id_of(config.run) or load_signed(Path(config.run)).run_id, state


def _no_address(signed: SignedManifest | None) -> str:
    """Return why a peer cannot find others, and what to do."""
    lacks = "a run id alone names no peer" if signed is None else "the published file names no bootstrap"
    return (
        f"{lacks}, so this computer cannot find the run. Ask for the whole join line; it has "
        "`--bootstrap /ip4/...` in it. Or add --alone: this peer then waits until others dial it"
    )


def _start_first(file: Path, is_new: bool) -> None:
    """Start the new peer. If no peer knows the run, its new folder is removed.

    Otherwise commands that look for the only peer of this machine would find it as a second one.
    """
    config = load(file, os.environ)
    try:
        start(config, _keeping(file, config.bootstrap))
    except UnknownRun as error:
        if not is_new:
            raise
        from peers.tools.leftovers import remove_state

        remove_state(file.parent)
        raise UserError(f"{error} (nothing is kept of this try)") from None
    except typer.Exit:
        if is_new and not is_there(
            file.with_name("run.json")
        ):  # It stopped before any peer sent the manifest.
            from peers.tools.leftovers import remove_state

            remove_state(file.parent)
        raise


def _keeping(file: Path, tried: Sequence[str]) -> Callable[[], str]:
    """Return a function to call when one of the bootstraps `tried` has responded. It returns a notice for the
    user.

    They are saved next to the peer file. They replace those in the file, unless one of these has responded
    before.
    """
    noted = file.with_name(ANSWERED)

    def keep() -> str:
        from peers.network.discovery.bootstrap import (  # Loads hivemind, which is running by now.
            REMEMBERED_PEERS,
            PeerCache,
        )

        try:
            before, named = PeerCache(noted).read(), load(file, os.environ).bootstrap
            notice = ""
            if set(named) >= set(tried):
                pass
            elif set(named) & set(before):
                notice = f"for this start only: {file} names another bootstrap, which has answered before"
            elif set_private(file, "bootstrap", list(tried), MEANINGS["bootstrap"]):
                notice = f"wrote  the bootstrap into {file}: it is used at every start from now on"
            addresses = {"addresses": list(dict.fromkeys([*tried, *before]))[:REMEMBERED_PEERS]}
            write_atomically(noted, json.dumps(addresses, indent=1).encode())
        except UserError as error:
            return f"the bootstrap that answered is not kept: {error}"
        return notice

    return keep


def _require_possible(config: PeerFile, signed: SignedManifest) -> None:
    """Raise UserError if the run lacks the requested stage, or this machine lacks what the stage needs."""
    from peers.config.run_file import require_stage
    from peers.data.local_text import require_text

    require_stage(config.stage, signed.manifest)
    require_text(signed.manifest, config)


def _folder(state: Path | None, run_id: RunId) -> Path:
    """Return the absolute path of the state folder for a run."""
    return (state or default_state(os.environ, sys.platform) / run_id[:RUN_DIGITS]).absolute()


def _whole_id(run: str, state: Path | None) -> str:
    """Return `run`. If it is the first digits of a run id in which this machine took part, return the whole
    id."""
    from peers.config.run_file import load_signed

    if not re.fullmatch(f"[0-9a-f]{{{RUN_DIGITS}}}", run) or is_there(Path(run)):
        return run
    kept = _folder(state, RunId(run)) / "run.json"
    found = load_signed(kept).run_id if is_there(kept) else ""
    return found if found.startswith(run) else run


def _named(run: str | None, archive: str | None) -> SignedManifest | None:
    """Return the run that the user named; None if only its id is known, so that peers must send the manifest.
    Raises UserError."""
    from peers.config.run_file import load_signed
    from peers.config.run_url import fetch_run, is_url

    if run is None:
        return _archived(archive)
    if run_id_of(run):
        return None
    if is_url(run):
        return fetch_run(run)
    if not is_there(Path(run)) and Path(run).suffix != ".json":
        raise UserError(
            f"{_shortened(run)} is neither a run id (64 hexadecimal digits, lower case), nor a published run "
            "file, nor a URL of one; the person who published the run can give you any of them"
        )
    _refuse_unpublished(Path(run))
    return load_signed(Path(run))


def _refuse_unpublished(path: Path) -> None:
    """Raise UserError, which names the right command, if `path` is a run file or a peer file."""
    from peers.config.explain import is_run_file

    if path.suffix not in (".yaml", ".yml") or not is_file(path):
        return
    if is_run_file(path):
        raise UserError(f"{path} is a run file; publish it first: `swarmnet publish {path}`")
    raise UserError(f"{path} is no published run; a peer file is started with `swarmnet run {path}`")


def _shortened(text: str) -> str:
    """Return a text for an error message; users may paste an invite or a whole file by mistake."""
    return text if len(text) <= 100 else f"{text[:80]!r}... ({len(text)} characters)"


def _archived(archive: str | None) -> SignedManifest:
    """Return the run of an archive. Raises UserError."""
    from peers.state.archive import Archive
    from peers.state.archive_store import open_store

    if archive is None:
        raise UserError("name the run: its id, its published file, or an archive of it (--from-archive)")
    return Archive(open_store(archive)).open()


def _own_name(config: PeerFile) -> str:
    """Return a default name that reveals nothing about the user: the end of the peer id. Creates the
    identity, as the first start would."""
    from protocols.signed.identity import IdentityError, load_or_create

    with as_user_errors(IdentityError):
        return load_or_create(config.identity).peer_id[-NAME_CHARACTERS:]


def _plain(stage: str) -> int | str:
    """Return a stage number, or the text if it is none."""
    return int(stage) if stage.isdecimal() and len(stage) <= MAX_STAGE_DIGITS else stage


def _again(file: Path, run_id: RunId, wanted: dict[str, str]) -> PeerFile:
    """Return the peer file of an earlier `join`, overridden by the options of this command. Raises UserError
    if it is for another run."""
    from peers.config.run_file import load_signed

    config = load(file, os.environ, wanted)
    if config.run is None:
        raise UserError(f"{file} is of a {config.role}; name another folder with --state")
    held = run_id_of(config.run) or load_signed(Path(config.run)).run_id
    if held != run_id:
        raise UserError(f"{file} is for run {held}; name another folder with --state")
    return config


_OPTIONAL = """
# Uncomment what you want:
# limits:
#   upload: 20Mbit/s                   # all uploads of this peer
#   memory: 8GiB                       # GPU memory, if it computes on a GPU
#   hours: "22:00-08:00"               # paused outside of these times
#   only_when_idle: true               # paused while other programs use this machine
#   only_when_plugged_in: true         # paused while this machine runs on its battery
# compute:
#   activation_checkpointing: layer     # less memory, for a third more compute
"""


def peer_yaml(data: dict[str, object]) -> str:
    """Return a commented peer file. JSON values are valid YAML."""
    lines = ["# Written by `swarmnet join`; yours to edit. All keys: swarmnet config explain"]
    for key, value in data.items():
        if key in MEANINGS:
            lines.append(f"# {MEANINGS[key]}")
        lines.append(f"{key}: {json.dumps(value, ensure_ascii=False)}")
    optional = _OPTIONAL if "limits" not in data else ""
    return "\n".join(lines) + "\n" + optional
