"""The command that sets a swarm under fire."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from peers.errors import UserError
from peers.files import require_free


def chaos(
    seed: Annotated[int, typer.Option(min=0, help="Chooses faults, their times and their victims.")] = 0,
    report: Annotated[Path | None, typer.Option(help="Write the JSON report here.")] = None,
    seconds: Annotated[float, typer.Option(min=30, max=86400, help="How long to train under fire.")] = 75.0,
    peers: Annotated[int, typer.Option(min=6, max=64, help="Peers that train.")] = 8,
    stages: Annotated[int, typer.Option(min=1, max=16, help="Stages the model is cut in.")] = 2,
    undisturbed: Annotated[int, typer.Option(min=0, max=16, help="Runs without faults to compare.")] = 3,
    keep: Annotated[Path | None, typer.Option(help="Keep the peers' folders here.")] = None,
) -> None:
    """Kill half of a real swarm, freeze a peer, kill a p2pd; then compare with undisturbed runs."""
    if peers < 3 * stages:
        raise UserError(f"--peers {peers}: {stages} stages need three peers each, so that some can be killed")
    if report is not None and not report.absolute().parent.is_dir():
        raise UserError(f"--report {report}: its folder does not exist")
    if keep is not None:
        require_free(keep, "--keep")
    from peers.chaos.swarm import ChaosOptions, run_chaos

    folder = keep.absolute() if keep is not None else Path(tempfile.mkdtemp(prefix="swarmnet-chaos-"))
    raise typer.Exit(run_chaos(ChaosOptions(seed, seconds, peers, stages, undisturbed, report, folder)))
