"""The command `join`: turn a published run file, its URL or a run id into a peer file, and start the peer.

The peer file (`peer.yaml`) has the peer's settings. It is in the peer's state folder, with identity and
checkpoints. A manifest is the signed description of a run; the hash of it is the run id.
"""

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

from peers.cli.control import open_in_browser
from peers.cli.join_questions import ask_consent, ask_name, is_interactive
from peers.cli.run import Bootstraps, InviteText, Settings, overrides, start
from peers.config.atomic_files import is_file, is_there, write_atomically
from peers.config.errors import UnknownRun, UserError, as_user_errors
from peers.config.peer_file import PeerFile, default_state, load, run_id_of, validate_peer_file
from peers.config.rewriting import set_key
from peers.config.yaml_lines import ParsedYaml, override_values
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
    "page": "address of the page of this computer, or off",
    "archive": "where to start from if no peer is online",
    "invite": "from the run's owner",
}
"""Comments above the keys of the peer file that `join` writes."""
PAGE_LISTEN = "127.0.0.1:9400"
"""Address at which a peer serves the page of this computer; another port if this one is taken."""
PAGE_FILE = "page.html"
"""File in the state folder that leads a browser to that page (peers/process/own_page.py)."""
RESPONDED_FILE = "bootstraps.json"
"""File next to the peer file with the bootstraps that responded, in the format of a PeerCache."""
MAX_STAGE_DIGITS = 5
"""Maximum digits of a stage, as in the names of archived checkpoints (`peers/state/archive.py`)."""
NAME_CHARACTERS = 6
"""Characters at the end of a peer id that are its default name: 38 thousand million different ones."""


def join(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN", help="A link (swarmnet:RUN@ADDRESS), a run id, a run file, or its URL."
        ),
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
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: neither a name nor for consent.")] = False,
    settings: Settings = None,
) -> None:
    """Join a run: write peer.yaml into the state folder and start the peer. A later call continues with
    it."""
    from peers.config.run_url import parse_join_link

    link = parse_join_link(run) if run is not None else None
    if link is not None:
        run, bootstrap = link.run_id, [*link.addresses, *(bootstrap or ())]
    if run is None and from_archive is None:
        run, state = _find_joined_peer(state)
    # The id stands behind `#` in a URL. If this machine has joined that run, nothing must be fetched.
    joined_id = RunId(_complete_run_id(run or "", state).rpartition("#")[2])
    if not is_there(_state_folder(state, joined_id) / PEER_FILE) or not run_id_of(joined_id):
        joined_id = RunId("")
    signed = None if joined_id else _load_run(run, from_archive)
    run_id = joined_id or RunId(run or "")
    if signed is not None:
        run_id = signed.run_id
    folder = _state_folder(state, run_id)
    file = folder / PEER_FILE
    data: dict[str, object] = {"bootstrap": list(bootstrap or ()), "stage": _stage_number(stage)}
    if from_archive is not None:
        data["archive"] = from_archive if "://" in from_archive else str(Path(from_archive).absolute())
    optional = {"name": name, "invite": invite}
    data |= {key: value for key, value in optional.items() if value is not None}
    set_options = overrides(settings)
    if is_there(file):  # Start the peer of an earlier call with the options that differ from the defaults.
        options = {key: json.dumps(value) for key, value in data.items() if value not in ([], "auto")}
        _restart(file, run_id, {**options, **set_options}, invite)  # Does not return.
    if not bootstrap and signed is not None and run is not None:
        data["bootstrap"] = list(signed.bootstraps)
    _join_first(
        folder,
        {"run": run_id, "state": ".", "page": PAGE_LISTEN, **data},
        signed,
        set_options,
        may_be_alone=alone or from_archive is not None,
        asks=not yes and is_interactive(),
    )


def _join_first(
    folder: Path,
    data: dict[str, object],
    signed: SignedManifest | None,
    set_options: dict[str, str],
    *,
    may_be_alone: bool,
    asks: bool,
) -> None:
    """Write the peer file of a new peer with the keys `data` and those of `--set`, start the peer, and exit
    with its code. `may_be_alone`: the peer may start without the address of another one. `asks`: a person is
    asked for a name and for consent first. Raises UserError."""
    from peers.runtime.state_lock import make_private

    file, run_id = folder / PEER_FILE, str(data["run"])
    typed = ParsedYaml("join", dict(data), {(key,): f"--{key}" for key in data})
    override_values(typed, {tuple(key.split(".")): (text, "--set") for key, text in set_options.items()})
    if asks and "name" not in typed.data and (name := ask_name()):
        typed.data["name"] = name
    # Without `name`, the validation takes the start of the run id, and the peer file a part of the peer id.
    has_name = "name" in typed.data
    config = validate_peer_file(typed, folder, run_id[:16], os.environ)
    if signed is not None:
        _require_possible(config, signed)
    if not (config.bootstrap or may_be_alone or config.lan is True):
        raise UserError(_no_address_message(signed))
    if asks:
        signed = ask_consent(config, run_id, signed)
        if signed is not None:
            _require_possible(config, signed)
    is_new = not is_there(folder)
    make_private(folder)
    if not has_name:
        typed.data["name"] = _default_name(config)
    _write_peer_file(file, typed, signed)
    if not typed.data.get("bootstrap") and not typed.data.get("archive"):
        typer.echo(
            "alone  this peer knows no address of another one: it waits until others dial it", err=True
        )
    typer.echo("start  Ctrl+C leaves politely (again: at once); `swarmnet top` shows more", err=True)
    _start_first(file, is_new, opens_page=asks)


def _restart(file: Path, run_id: RunId, options: dict[str, str], invite: str | None) -> None:
    """Start the peer of an earlier `join`, whose peer file is `file`, and exit with its code. `options` (YAML
    text by key) apply to this start only; the invite is also saved. Raises UserError if the peer file is for
    another run."""
    config = _load_peer_file(file, run_id, options)
    if invite and set_key(file, "invite", invite, MEANINGS["invite"]):
        typer.echo(f"wrote  the invite into {file}: it is used at every start from now on", err=True)
    start(config, _bootstrap_saver(file, config.bootstrap))


def _write_peer_file(file: Path, typed: ParsedYaml, signed: SignedManifest | None) -> None:
    """Write the peer file, and next to it the published run if it is known. Raises UserError."""
    from peers.config.run_file import published_text

    if signed is not None:
        write_atomically(file.with_name("run.json"), published_text(signed).encode())
        typed.data["run"] = "run.json"
    # Private, because it may contain an invite or a password.
    write_atomically(file, peer_yaml(typed.data).encode(), private=True)
    typer.echo(f"wrote  {file}   yours to edit; `swarmnet config explain` has all keys", err=True)


def _find_only_peer() -> Path | None:
    """Return the state folder of the only peer that has joined on this computer; None if none has. Raises
    UserError, which lists the peers, if there are several."""
    folders = [state for state in states_here() if is_there(state / PEER_FILE)]
    if len(folders) > 1:
        commands = ", ".join(f"`swarmnet join --state {shlex.quote(str(state))}`" for state in folders)
        raise UserError(f"{len(folders)} peers have joined on this computer; resume one: {commands}")
    return folders[0] if folders else None


def _find_joined_peer(state: Path | None) -> tuple[str | None, Path | None]:
    """Return the run id and the state folder of the peer that has joined earlier: the one in `state`, or the
    only one of this computer. The run id is None if there is no such peer. Raises UserError."""
    from peers.config.run_file import load_signed

    state = state or _find_only_peer()
    if state is None or not is_there(state / PEER_FILE):
        return None, state
    config = load(state / PEER_FILE, os.environ)
    if config.run is None:
        raise UserError(
            f"{state / PEER_FILE} is of a {config.role}; start it with `swarmnet run {state / PEER_FILE}`"
        )
    return run_id_of(config.run) or load_signed(Path(config.run)).run_id, state


def _no_address_message(signed: SignedManifest | None) -> str:
    """Return the error message for a peer without an address to dial. `signed`: the run, if it is known."""
    reason = "a run id alone names no peer" if signed is None else "the published file names no bootstrap"
    return (
        f"{reason}, so this computer cannot find the run. Ask for the whole join line; it has "
        "the address in it (swarmnet:RUN@/ip4/...). Or add --alone: this peer then waits until others dial it"
    )


def _start_first(file: Path, is_new: bool, opens_page: bool) -> None:
    """Start a new peer, and exit with its code. If no peer knows the run, or the new peer ends before another
    has sent the manifest (run.json), remove the new state folder. `is_new` is False if the folder existed
    before; it then stays. `opens_page`: once a bootstrap has answered, open the page of this computer.

    Otherwise commands that look for the only peer of this machine would find the failed one, too.
    """
    config = load(file, os.environ)
    save_bootstraps = _bootstrap_saver(file, config.bootstrap)
    to_open = [file.with_name(PAGE_FILE)] if opens_page and config.page != "off" else []

    def joined() -> str:
        while to_open:  # Once: p2pd may start again and join again.
            open_in_browser(to_open.pop())
        return save_bootstraps()

    try:
        start(config, joined)
    except UnknownRun as error:
        if not is_new:
            raise
        from peers.tools.leftovers import remove_state

        remove_state(file.parent)
        raise UserError(f"{error} (nothing is kept of this try)") from None
    except typer.Exit:
        has_manifest = is_there(file.with_name("run.json"))
        if is_new and not has_manifest:
            from peers.tools.leftovers import remove_state

            remove_state(file.parent)
        raise


def _bootstrap_saver(file: Path, tried: Sequence[str]) -> Callable[[], str]:
    """Return a function to call when one of the bootstraps `tried` has responded. The function saves `tried`
    and returns a notice for the user, empty for none.

    `tried` is saved in RESPONDED_FILE. It also replaces the bootstraps of the peer file, unless one of those
    has responded at an earlier start.
    """
    responded_file = file.with_name(RESPONDED_FILE)

    def save_bootstraps() -> str:
        from peers.network.discovery.bootstrap import (  # Loads hivemind, which is running by now.
            REMEMBERED_PEERS,
            PeerCache,
        )

        try:
            responded_before = PeerCache(responded_file).read()
            in_peer_file = load(file, os.environ).bootstrap
            notice = ""
            if set(in_peer_file) >= set(tried):
                pass  # The peer file names them already.
            elif set(in_peer_file) & set(responded_before):
                notice = f"for this start only: {file} names another bootstrap, which has answered before"
            elif set_key(file, "bootstrap", list(tried), MEANINGS["bootstrap"]):
                notice = f"wrote  the bootstrap into {file}: it is used at every start from now on"
            addresses = list(dict.fromkeys([*tried, *responded_before]))[:REMEMBERED_PEERS]
            write_atomically(responded_file, json.dumps({"addresses": addresses}, indent=1).encode())
        except UserError as error:
            return f"the bootstrap that answered is not kept: {error}"
        return notice

    return save_bootstraps


def _require_possible(config: PeerFile, signed: SignedManifest) -> None:
    """Raise UserError if the run lacks the requested stage, or this machine lacks what the stage needs."""
    from peers.config.run_file import require_stage
    from peers.data.local_text import require_text

    require_stage(config.stage, signed.manifest)
    require_text(signed.manifest, config)


def _state_folder(state: Path | None, run_id: RunId) -> Path:
    """Return the absolute path of the state folder for a run."""
    return (state or default_state(os.environ, sys.platform) / run_id[:RUN_DIGITS]).absolute()


def _complete_run_id(run: str, state: Path | None) -> str:
    """Return the full run id if `run` is its first RUN_DIGITS digits and this machine took part in that run.
    Return any other text unchanged."""
    from peers.config.run_file import load_signed

    is_short_id = re.fullmatch(f"[0-9a-f]{{{RUN_DIGITS}}}", run) is not None
    if not is_short_id or is_there(Path(run)):  # A file may have such a name.
        return run
    saved_run = _state_folder(state, RunId(run)) / "run.json"
    full_id = load_signed(saved_run).run_id if is_there(saved_run) else ""
    return full_id if full_id.startswith(run) else run


def _load_run(run: str | None, archive: str | None) -> SignedManifest | None:
    """Return the published run that the user named: a file, a URL, or without one the run in `archive`. None
    for a run id, because then other peers must send the manifest. Raises UserError."""
    from peers.config.run_file import load_signed
    from peers.config.run_url import fetch_run, is_url

    if run is None:
        return _load_archived_run(archive)
    if run_id_of(run):
        return None
    if is_url(run):
        return fetch_run(run)
    if not is_there(Path(run)) and Path(run).suffix != ".json":
        raise UserError(
            f"{_shortened(run)} is neither a run id (64 hexadecimal digits, lower case), nor a link "
            "(swarmnet:RUN@ADDRESS), nor a published run file, nor a URL of one; the person who published "
            "the run can give you any of them"
        )
    _refuse_unpublished(Path(run))
    return load_signed(Path(run))


def _refuse_unpublished(path: Path) -> None:
    """Raise UserError, which names the right command, if `path` is an unpublished run file or a peer file."""
    from peers.config.explain import is_run_file

    if path.suffix not in (".yaml", ".yml") or not is_file(path):
        return
    if is_run_file(path):
        raise UserError(f"{path} is a run file; publish it first: `swarmnet publish {path}`")
    raise UserError(f"{path} is no published run; a peer file is started with `swarmnet run {path}`")


def _shortened(text: str) -> str:
    """Return a text for an error message; users may paste an invite or a whole file by mistake."""
    return text if len(text) <= 100 else f"{text[:80]!r}... ({len(text)} characters)"


def _load_archived_run(archive: str | None) -> SignedManifest:
    """Return the published run that an archive (folder or URL with the checkpoints of a run) contains. Raises
    UserError, also if the user named neither run nor archive."""
    from peers.state.archive import Archive
    from peers.state.archive_store import open_store

    if archive is None:
        raise UserError("name the run: its id, its published file, or an archive of it (--from-archive)")
    return Archive(open_store(archive)).open()


def _default_name(config: PeerFile) -> str:
    """Return a default name that reveals nothing about the user: the end of the peer id. Creates the
    identity, as the first start would."""
    from protocols.signed.identity import IdentityError, load_or_create

    with as_user_errors(IdentityError):
        return load_or_create(config.identity).peer_id[-NAME_CHARACTERS:]


def _stage_number(stage: str) -> int | str:
    """Return the stage as a number if the text is one, else the text, such as `auto`."""
    return int(stage) if stage.isdecimal() and len(stage) <= MAX_STAGE_DIGITS else stage


def _load_peer_file(file: Path, run_id: RunId, options: dict[str, str]) -> PeerFile:
    """Return an existing peer file, overridden by `options`. Raises UserError if it is for another run."""
    from peers.config.run_file import load_signed

    config = load(file, os.environ, options)
    if config.run is None:
        raise UserError(f"{file} is of a {config.role}; name another folder with --state")
    file_run_id = run_id_of(config.run) or load_signed(Path(config.run)).run_id
    if file_run_id != run_id:
        raise UserError(f"{file} is for run {file_run_id}; name another folder with --state")
    return config


_OPTIONAL = """
# Uncomment what you want:
# limits:
#   upload: 20Mbit/s                   # all uploads of this peer
#   memory: 8GiB                       # GPU memory, if it computes on a GPU
#   hours: "22:00-08:00"               # paused outside of these times
#   only_when_idle: true               # paused while other programs use this machine
#   share_when_busy: 0.2               # with only_when_idle: not paused, but this part of the time
#   only_when_plugged_in: true         # paused while this machine runs on its battery
# compute:
#   activation_checkpointing: layer     # less memory, for a third more compute
"""


def peer_yaml(data: dict[str, object]) -> str:
    """Return the text of a peer file with these keys, with comments. Values are JSON, which is valid YAML."""
    lines = ["# Written by `swarmnet join`; yours to edit. All keys: swarmnet config explain"]
    for key, value in data.items():
        if key in MEANINGS:
            lines.append(f"# {MEANINGS[key]}")
        lines.append(f"{key}: {json.dumps(value, ensure_ascii=False)}")
    limits_as_comment = _OPTIONAL if "limits" not in data else ""
    return "\n".join(lines) + "\n" + limits_as_comment
