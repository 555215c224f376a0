"""The demo's live table: the swarm's numbers, one line for each peer, and recent events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from peers.lab.processes.local_processes import DemoPeer
from peers.telemetry.console import amount, pace


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of the demo at one time; `elapsed` and `seconds` are the time so far and in all."""

    elapsed: float
    seconds: float
    peers: Sequence[DemoPeer]
    happened: Sequence[str]


def table(moment: Moment) -> Group:
    """Return the whole screen."""
    rows = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    rows.add_column("peer")
    rows.add_column("stage", justify="right")
    rows.add_column("state")
    for name in ("round", "loss", "tok/s", "up", "down"):
        rows.add_column(name, justify="right")
    for peer in sorted(moment.peers, key=lambda peer: (peer.status.get("stage", 99), peer.name)):
        rows.add_row(*_cells(peer), style="dim" if not peer.alive else "")
    return Group(
        _head(moment),
        ProgressBar(total=moment.seconds, completed=moment.elapsed, width=72),
        Text(),
        rows,
        Text(),
        *(Text(line, style="dim") for line in moment.happened),
    )


def _head(moment: Moment) -> Text:
    live = [peer for peer in moment.peers if peer.alive]
    first = [peer.status for peer in live if peer.status.get("stage") == 0]
    losses = [status["loss"] for status in first if status.get("loss") is not None]
    speed = sum(status.get("tokens_per_second") or 0.0 for status in first)
    tokens = sum(peer.status.get("tokens", 0) for peer in moment.peers if peer.status.get("stage") == 0)
    rounds = max((peer.status.get("round") or 0 for peer in moment.peers), default=0)
    loss = f"{sum(losses) / len(losses):.3f}" if losses else "-"
    return Text.assemble(
        ("swarmnet demo", "bold"),
        f"   {moment.elapsed:4.0f} / {moment.seconds:.0f} s   peers {len(live)}   round {rounds}   loss ",
        (loss, "bold"),
        f"   {pace(speed)}   {tokens:,} tokens",
    )


def _cells(peer: DemoPeer) -> tuple[str, ...]:
    status = peer.status
    state = str(status.get("state", "starting"))
    if not peer.alive:
        state = "killed" if peer.killed_at is not None else "ended"
    loss, speed = status.get("loss"), status.get("tokens_per_second")
    return (
        peer.name,
        str(status.get("stage", "")),
        state,
        str(status.get("round") or 0),
        f"{loss:.3f}" if loss is not None else "-",
        f"{speed:,.0f}" if speed is not None and peer.alive else "-",
        amount(status.get("sent_bytes", 0)),
        amount(status.get("received_bytes", 0)),
    )
