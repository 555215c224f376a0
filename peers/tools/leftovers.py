"""Find and remove the files that peers left on this machine. In a state folder only file names that peers
write are removed; elsewhere only what the user names. No link is followed."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from peers.config.errors import UserError
from peers.runtime.state_lock import is_held, lock_state_folder
from peers.telemetry.event_log import LOG_FILE
from protocols.daemon import temporary
from protocols.signed.identity import IdentityError
from protocols.signed.identity import load as load_identity

IDENTITY = "identity.key"
OF_A_STATE = {
    IDENTITY: "",
    ".identity.key.*": "",
    "peer.yaml": "",
    "run.json": "",
    "peers.json": "",
    "line.json": "",
    "bootstraps.json": "",
    "receipts.jsonl": "",
    "totals.json": "",
    "people.json": "",
    "page.html": "",
    LOG_FILE: "",
    f"{LOG_FILE}.old": "",
    "order.bin": "",
    "moderated-order.bin": "",
    "height.json": "",
    "lock": "",
    "control.sock": "",
    ".*.part": "",
    "checkpoints": "checkpoints",
    "text": "text",
}
"""Names that peers write in a state folder; for a folder, the kind of its content."""
IN = {
    "state": OF_A_STATE,
    "checkpoints": {
        "stage-*-round-*.safetensors": "",
        "stage-*-round-*.given-up": "",
        ".stage-*.part": "",
        "download": "download",
    },
    "download": {"[0-9a-f]" * 64: "", ".*": "", "*.part": ""},
    "text": {"*.tokens": "", "*.part": "", ".*.part": "", "newest.json": ""},
}
"""Names that peers write, by kind of folder."""
SHOWS_A_STATE = (IDENTITY, "peer.yaml", LOG_FILE, "lock")


@dataclass(slots=True)
class StateFolder:
    """State folder of a peer."""

    folder: Path
    running: bool
    ours: list[Path] = field(default_factory=list)
    """Files and links that peers write, each before the folder that contains it."""
    others: list[Path] = field(default_factory=list)
    """Other files in the folder, which are kept."""
    bytes: int = 0


@dataclass(slots=True)
class Leftovers:
    """All files that were found."""

    states: list[StateFolder] = field(default_factory=list)
    keys: list[Path] = field(default_factory=list)
    """Owner keys that the user named for removal."""
    stays: list[tuple[Path, str]] = field(default_factory=list)
    """Paths that are kept, each with the reason."""

    @property
    def empty(self) -> bool:
        return not (any(state.ours for state in self.states) or self.keys)


def find(home: Path, units: Path, more: Sequence[Path], keys: Sequence[Path]) -> Leftovers:
    """Find what peers wrote: the state folders below `home`, the folders `more`, and the owner keys `keys`.
    Files of others in a state folder, units in the folder `units`, and temporary folders are listed as kept,
    with the reason. Raises UserError if one of `more` is no state folder, or one of `keys` no owner key."""
    found = Leftovers()
    folders = [*_below(home, found), *(_named(path) for path in more)]
    folders = list(dict.fromkeys(folder.resolve() for folder in folders))
    owners = {owner for folder in folders if (owner := _owner(folder / "run.json"))}
    found.keys = [_owner_key(path) for path in keys]
    for folder in folders:
        state = StateFolder(folder, is_held(folder))
        _sort(folder, "state", state, owners, found)
        found.states.append(state)
        found.stays += [(path, "no peer made it") for path in state.others]
    for unit in sorted(units.glob("swarmnet*.service")):
        removal = f"systemctl --user disable --now {unit.name} && rm {shlex.quote(str(unit))}"
        found.stays.append((unit, f"a unit, removed by hand: {removal}"))
    for folder in temporary.folders():
        if folder.stat().st_uid == os.geteuid():
            size = _bytes_in(folder) / 1e6
            found.stays.append((folder, f"{size:,.2f} MB of a demo or a command; no state here names it"))
    return found


def _bytes_in(folder: Path) -> int:
    """Return the size of the folder's files, without files that vanish meanwhile. No link is followed."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(place) / name).lstat().st_size
    return total


def _below(home: Path, found: Leftovers) -> Iterator[Path]:
    for path in sorted(home.iterdir()) if home.is_dir() else ():
        if path.is_symlink():
            found.stays.append((path, "a link: what it leads to is named with --state"))
        elif path.is_dir() and _is_state(path):
            yield path
        elif path.name == "orders":
            found.stays.append((path, "what an owner has ordered from here"))
        elif path.suffix == ".key":
            why = "an owner's key: without it no orders can be given in its runs; --owner-key FILE removes it"
            found.stays.append((path, why))
        else:
            found.stays.append((path, "no peer made it"))


def _is_state(folder: Path) -> bool:
    return any((folder / name).is_file() for name in SHOWS_A_STATE)


def _named(path: Path) -> Path:
    if path.is_symlink() or not path.is_dir() or not _is_state(path):
        raise UserError(f"--state {path}: is no state folder of a peer; nothing was removed")
    return path


def _owner_key(path: Path) -> Path:
    try:
        load_identity(path)
    except IdentityError as error:
        raise UserError(f"--owner-key {path}: {error}; nothing was removed") from None
    return path.resolve()


def _owner(run: Path) -> str | None:
    """Return the owner of a run file; None if it is missing or unreadable."""
    try:
        return str(json.loads(run.read_bytes())["manifest"]["owner"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _sort(folder: Path, kind: str, state: StateFolder, owners: Collection[str], found: Leftovers) -> None:
    """Sort each entry into files that peers write and files to keep."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        path = Path(entry.path)
        inside = next((what for name, what in IN[kind].items() if fnmatch.fnmatch(entry.name, name)), None)
        is_folder = entry.is_dir(follow_symlinks=False)
        if entry.name == IDENTITY and path not in found.keys and _identity(path) in owners:
            found.stays.append((path, "it signs for a run as its owner; --owner-key FILE removes it"))
        elif path in found.keys:
            pass
        elif inside and is_folder:
            _sort(path, inside, state, owners, found)
            state.ours.append(path)
        elif inside is None or is_folder:
            state.others.append(path)
        else:
            state.ours.append(path)
            state.bytes += entry.stat(follow_symlinks=False).st_size


def _identity(path: Path) -> str | None:
    try:
        return load_identity(path).peer_id
    except IdentityError:
        return None


def require_rest(found: Leftovers) -> None:
    """Raise UserError if a peer is running."""
    running = [str(state.folder) for state in found.states if state.running]
    if running:
        raise UserError(f"nothing was removed: a peer runs; end it first: swarmnet leave {' '.join(running)}")


def remove(found: Leftovers) -> list[str]:
    """Remove everything except what is kept. Return a line for each removal. Raises UserError if a peer is
    running or the disk refuses."""
    require_rest(found)
    told = []
    for file in found.keys:
        file.unlink(missing_ok=True)
        told.append(_describe(file))
    for state in found.states:
        with lock_state_folder(state.folder):
            told += _removed(state)
    return told


def remove_state(folder: Path) -> None:
    """Remove the peer's files from a folder that this process made, and the folder. Raises UserError."""
    state = StateFolder(folder, running=False)
    _sort(folder, "state", state, (), Leftovers())
    _removed(state)


def _removed(state: StateFolder) -> list[str]:
    """Remove the peer's files. Raises UserError if the disk refuses; earlier removals are not undone."""
    for path in (
        *state.ours,
        state.folder / "lock",
    ):  # This process holds the lock.
        try:
            if path.is_dir() and not path.is_symlink():
                _remove_empty(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"{path}: cannot be removed: {error.strerror}") from None
    _remove_empty(state.folder)
    return [_describe(state.folder)]


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # Fails if other files are in it.
        folder.rmdir()


def _describe(path: Path) -> str:
    return f"removed  {path}" if not os.path.lexists(path) else f"in part  {path}: the rest stays"
