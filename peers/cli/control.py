"""Commands for a running peer of this machine: pause, resume, leave, credit. Each sends a request to the
peer's process, which is found by its state folder."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from peers.config.errors import UserError
from peers.runtime.control_client import ask, runs
from peers.runtime.find_running import state_of
from peers.runtime.state_lock import is_held

Where = Annotated[
    Path | None,
    typer.Argument(
        metavar="[STATE|PEER.yaml]", help="State folder or peer file. [default: the running peer]"
    ),
]
ANSWER_SECONDS = 15.0
"""Time limit of a response, long enough for a machine that swaps."""
PAUSE_SECONDS = 65.0
"""Time limit of pausing. It takes about 5 s, unless the peer is the only one with its weights and saves them
first. The peer responds after a minute at the latest, and pauses in any case."""
LEAVE_SECONDS = 15.0
"""Time limit of leaving, in addition to `drain_seconds` of the peer file."""


def pause(where: Where = None) -> None:
    """Pause a peer and free its memory within seconds."""
    answer = ask(state_of(where, "pause"), {"do": "pause"}, PAUSE_SECONDS)
    before, after = answer["bytes_before"] / 1e6, answer["bytes"] / 1e6
    typer.echo(
        f"paused after {answer['seconds']:.1f} s; memory {before:,.0f} MB -> {after:,.0f} MB; "
        "`swarmnet resume` continues"
    )


def resume(where: Where = None) -> None:
    """Resume a peer after `swarmnet pause`."""
    remaining_pauses = ask(state_of(where, "resume"), {"do": "resume"}, ANSWER_SECONDS)["paused"]
    if not remaining_pauses:
        typer.echo("resumes: joins its stage again")
        return
    typer.echo("no longer paused by you, but still:")
    for reason, text in remaining_pauses.items():
        typer.echo(f"  {reason}: {text}")


def leave(where: Where = None) -> None:
    """Stop a peer cleanly, as Ctrl+C does: it finishes its work and hands it over."""
    state = state_of(where, "leave")
    if not runs(state) and is_held(state):  # The peer has locked the folder but does not listen.
        raise UserError(f"the peer of {state} is just starting or ending; ask again in some seconds")
    answer = ask(state, {"do": "leave"}, ANSWER_SECONDS)
    _wait_until_ended(state, float(answer["drain_seconds"]) + LEAVE_SECONDS)
    typer.echo("has left")


def credit(
    where: Where = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what this peer contributed, by the signed receipts of other peers."""
    from peers.telemetry.console import shown
    from peers.tools.credit import from_disk, lines  # Loads torch, through the receipts.

    state = state_of(where, "credit", at_rest=True)
    receipts = ask(state, {"do": "credit"}, ANSWER_SECONDS) if runs(state) else from_disk(state)
    text = json.dumps(receipts, indent=1) if as_json else "\n".join(lines(receipts))
    typer.echo(shown(text, sys.stdout))  # The run's name is from its owner, who is not trusted.


def _wait_until_ended(state: Path, seconds: float) -> None:
    """Wait until the peer has ended and unlocked its state folder. Raises UserError after `seconds`."""
    deadline = time.monotonic() + seconds
    while is_held(state):
        if time.monotonic() > deadline:
            raise UserError(
                f"the peer of {state} still runs after {seconds:g} s; SIGTERM, sent twice, ends it at once"
            )
        time.sleep(0.1)
