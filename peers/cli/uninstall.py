"""The command `uninstall`: all that peers left on this machine, named and then removed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peers.config.peer_file import default_state
from peers.errors import UserError

if TYPE_CHECKING:
    from peers.tools.leftovers import Leftovers


def uninstall(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    state: Annotated[
        list[Path] | None, typer.Option(help="A state folder that lies elsewhere. Repeatable.")
    ] = None,
    owner_key: Annotated[
        list[Path] | None, typer.Option(help="An owner's key that is to go, too. Repeatable.")
    ] = None,
) -> None:
    """Remove the states that peers left here. Asks before it does."""
    from peers.tools import leftovers

    home = default_state(os.environ, sys.platform)
    configuration = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    found = leftovers.find(home, configuration / "systemd" / "user", state or [], owner_key or [])
    if not dry_run:
        leftovers.require_rest(found)
        if not (yes or found.empty or sys.stdin.isatty()):
            raise UserError("nothing was removed: there is nobody to ask; --yes removes it all the same")
    for line in _lines(found):
        typer.echo(line)
    if dry_run or found.empty:
        return
    if not yes and not typer.confirm("Remove all of this? It cannot be had back"):
        raise UserError("nothing was removed")
    for line in leftovers.remove(found):
        typer.echo(line)
    if home.is_dir() and not any(home.iterdir()):
        home.rmdir()


def _lines(found: Leftovers) -> list[str]:
    lines = ["to remove:" if not found.empty else "nothing is there to remove"]
    for state in found.states:
        runs = "   a peer runs there" if state.running else ""
        lines.append(f"  state    {state.folder}   {state.bytes / 1e6:,.2f} MB{runs}")
    lines += [f"  key      {path}   an owner's, as it was named" for path in found.keys]
    lines.append("stays:")
    lines += [f"  {path}   {why}" for path, why in found.stays if path not in found.keys]
    lines.append(f"  {sys.prefix}   this program; remove it by hand, with the folder it was cloned into")
    return lines
