"""Commands for a peer that runs: pause, resume, leave, me."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from peers.errors import UserError
from peers.runtime.control_client import ask, runs
from peers.runtime.find_running import state_of
from peers.runtime.state_lock import is_held

Where = Annotated[
    Path | None,
    typer.Argument(
        metavar="[STATE|PEER.yaml]", help="A peer's state folder or peer file. [default: the one that runs]"
    ),
]
ANSWER_SECONDS = 15.0
"""For a machine that swaps."""
PAUSE_SECONDS = 65.0
"""About five, unless the peer is alone with its weights and first brings them to disk; the peer itself
answers after a minute at the latest, and pauses all the same."""
LEAVE_SECONDS = 15.0
"""Besides the time that the peer file gives it to finish."""


def pause(where: Where = None) -> None:
    """Stop taking part and free the memory within seconds; the peer stays to be resumed."""
    answer = ask(state_of(where, "pause"), {"do": "pause"}, PAUSE_SECONDS)
    before, held = answer["bytes_before"] / 1e6, answer["bytes"] / 1e6
    typer.echo(
        f"paused after {answer['seconds']:.1f} s; memory {before:,.0f} MB -> {held:,.0f} MB; "
        "`swarmnet resume` goes on"
    )


def resume(where: Where = None) -> None:
    """Take part again after `swarmnet pause`."""
    still = ask(state_of(where, "resume"), {"do": "resume"}, ANSWER_SECONDS)["paused"]
    if not still:
        typer.echo("resumes: joins its stage again")
        return
    typer.echo("no longer paused by you, but still:")
    for reason, text in still.items():
        typer.echo(f"  {reason}: {text}")


def leave(where: Where = None) -> None:
    """End a peer politely, as Ctrl+C does: what is under way is finished and handed over."""
    state = state_of(where, "leave")
    if not runs(state) and is_held(state):
        raise UserError(f"the peer of {state} is just starting or ending; ask again in some seconds")
    answer = ask(state, {"do": "leave"}, ANSWER_SECONDS)
    _until_ended(state, float(answer["drain_seconds"]) + LEAVE_SECONDS)
    typer.echo("has left")


def credit(
    where: Where = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Am I counted? What this peer contributed, by the signed receipts of others."""
    from peers.telemetry.console import shown
    from peers.tools.credit import from_disk, lines  # torch, by way of the receipts

    state = state_of(where, "credit", at_rest=True)
    found = ask(state, {"do": "credit"}, ANSWER_SECONDS) if runs(state) else from_disk(state)
    text = json.dumps(found, indent=1) if as_json else "\n".join(lines(found))
    typer.echo(shown(text, sys.stdout))  # The run's name is its owner's.


def _until_ended(state: Path, seconds: float) -> None:
    """Wait for the state folder's lock, which a peer holds as long as it lives."""
    until = time.monotonic() + seconds
    while is_held(state):
        if time.monotonic() > until:
            raise UserError(
                f"the peer of {state} still runs after {seconds:g} s; SIGTERM, sent twice, ends it at once"
            )
        time.sleep(0.1)
