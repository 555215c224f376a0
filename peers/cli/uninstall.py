"""The command `uninstall`: list what peers left on this machine, and remove it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from peers.config.errors import UserError
from peers.config.peer_file import default_state

if TYPE_CHECKING:
    from peers.tools.leftovers import Leftovers


def uninstall(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove without asking.")] = False,
    state: Annotated[
        list[Path] | None, typer.Option(help="State folder in another place. Repeatable.")
    ] = None,
    owner_key: Annotated[
        list[Path] | None, typer.Option(help="Owner's key to remove, too. Repeatable.")
    ] = None,
) -> None:
    """Remove the state that peers left on this machine, after confirmation."""
    from peers.tools import leftovers

    home = default_state(os.environ, sys.platform)
    configuration = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    leftover = leftovers.find(home, configuration / "systemd" / "user", state or [], owner_key or [])
    if not dry_run:
        leftovers.require_rest(leftover)
        if not (yes or leftover.empty or sys.stdin.isatty()):
            raise UserError("nothing was removed: this is no terminal, so nobody can confirm; add --yes")
    for line in _describe(leftover):
        typer.echo(line)
    if dry_run or leftover.empty:
        return
    if not yes and not typer.confirm("Remove all of this? It cannot be restored"):
        raise UserError("nothing was removed")
    for line in leftovers.remove(leftover):
        typer.echo(line)
    if home.is_dir() and not any(home.iterdir()):
        home.rmdir()


def _describe(leftover: Leftovers) -> list[str]:
    """Return lines that list what is removed and what stays, for the user to confirm."""
    lines = ["to remove:" if not leftover.empty else "there is nothing to remove"]
    for state in leftover.states:
        running_note = "   a peer runs there" if state.running else ""
        lines.append(f"  state    {state.folder}   {state.bytes / 1e6:,.2f} MB{running_note}")
    lines += [f"  key      {path}   owner's key" for path in leftover.keys]
    lines.append("stays:")
    lines += [f"  {path}   {why}" for path, why in leftover.stays if path not in leftover.keys]
    lines.append(f"  {sys.prefix}   this program; remove it by hand, with the folder it was cloned into")
    return lines
