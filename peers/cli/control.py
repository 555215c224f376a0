"""Commands for a running peer of this machine: pause, resume, leave, limit, page, credit.

Each sends a request to the process of the peer, which is found by its state folder."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from peers.cli.join_questions import is_interactive
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
LIMIT_KEYS = {
    "upload": "upload",
    "traffic": "traffic_per_month",
    "hours": "hours",
    "share": "compute_duty_cycle",
    "idle": "only_when_idle",
    "busy": "share_when_busy",
    "mains": "only_when_plugged_in",
}
"""The words of `swarmnet limit`, and the keys of the peer file that they set."""
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


def limit(
    name: Annotated[
        str | None,
        typer.Argument(metavar=f"[{'|'.join(LIMIT_KEYS)}]", help="Limit to change. [default: show all]"),
    ] = None,
    value: Annotated[
        str | None,
        typer.Argument(metavar="[VALUE]", help="Such as 2MB/s, 500GB, 22:00-08:00, 50%, on; none: no limit."),
    ] = None,
    state: Annotated[
        Path | None, typer.Option(metavar="STATE|PEER.yaml", help="State folder or peer file.")
    ] = None,
) -> None:
    """Show or change what a running peer may use of this computer. `swarmnet join` applies it again."""
    if name is not None and value is None:
        raise UserError(
            f"limit {name}: name the value as well, such as `swarmnet limit upload 2MB/s`, or none"
        )
    request: dict[str, object] = {"do": "limit"}
    if name is not None and value is not None:
        if name not in LIMIT_KEYS:
            raise UserError(f"{name!r} is no limit; there are: {', '.join(LIMIT_KEYS)}")
        request["set"] = {LIMIT_KEYS[name]: _limit_value(name, value)}
    answer = ask(state_of(state, "limit"), request, ANSWER_SECONDS)
    for word, key in LIMIT_KEYS.items():
        typer.echo(f"{word:<8}{_shown_limit(word, answer['limits'][key])}")
    if not answer["saved"]:
        typer.echo(
            "this holds until the peer stops: its peer file is not one that `swarmnet join` wrote", err=True
        )


def _limit_value(name: str, value: str) -> object:
    """Return the value of a limit as the control socket takes it. Raises UserError."""
    if name in ("idle", "mains"):
        if value not in ("on", "off", "none"):
            raise UserError(f"{name} is {value!r}; expected on or off")
        return value == "on"
    if name in ("share", "busy"):
        number = value.removesuffix("%")
        if value == "none":
            return 1.0 if name == "share" else 0.0
        if not number.isdecimal() or not 1 <= int(number) <= 100:
            raise UserError(f"{name} is {value!r}; expected a percentage such as 50%")
        return int(number) / 100
    return None if value == "none" else value


def _shown_limit(name: str, value: object) -> str:
    """Return a limit for people."""
    from peers.telemetry.console import amount

    if value is None:
        return "all day" if name == "hours" else "no limit"
    match name, value:
        case "upload", int() | float():
            return f"{amount(value)}/s ({value / 125_000:.3g} Mbit/s)"
        case "traffic", int():
            return f"{amount(value)} a month"
        case "share" | "busy", int() | float():
            return f"{value:.0%} of the time" if value else "paused"
        case "idle" | "mains", bool():
            return "on" if value else "off"
        case _:
            return str(value)


def page(where: Where = None) -> None:
    """Show the address of this computer's page, and open it on a desktop."""
    answer = ask(state_of(where, "page"), {"do": "page"}, ANSWER_SECONDS)
    typer.echo(answer["url"])
    open_in_browser(Path(answer["file"]))


def open_in_browser(file: Path) -> None:
    """Open a file in the user's browser, if a person at a desktop is there. A browser without a window would
    take over the terminal, so none is started then."""
    has_desktop = sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if has_desktop and is_interactive():
        # In a thread, because some browsers keep the caller waiting.
        threading.Thread(target=webbrowser.open, args=(file.absolute().as_uri(),), daemon=True).start()


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
