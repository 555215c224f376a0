"""The messages of a starting peer: what it found of the run, and what this machine will do for it.

The directory is asked once, in parallel with the start; nothing waits for the answer.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from statistics import median

from peers.compute.memory_budget import gib
from peers.config.limits import LimitsFile
from peers.config.run_file import SignedManifest
from peers.network.discovery.record_reader import look
from peers.telemetry.console import amount, counted, printable
from protocols.errors import WireError
from protocols.ports import Directory
from protocols.signed.records import SignedRecord
from swarmnet.identifiers import PeerId
from swarmnet.model.computing.choices import Computing
from swarmnet.resources.bandwidth_estimate import MONTH_SECONDS, traffic_of
from swarmnet.resources.memory_estimate import Needs
from swarmnet.resources.working_hours import DAY_MINUTES
from swarmnet.run.manifest import Manifest

PACE_SECONDS = 20.0
"""Long enough for some rounds, and longer than caches take to warm up."""
PACE_MICROBATCHES = 8


class FirstStage:
    """The stage that a peer serves first, for what waits until it is chosen."""

    def __init__(self) -> None:
        self._stage = -1
        self._chosen = asyncio.Event()

    def serve(self, stage: int) -> None:
        """Called with each stage that the peer begins to serve."""
        if not self._chosen.is_set():
            self._stage = stage
            self._chosen.set()

    async def wait(self) -> int:
        """Return the stage once it is chosen."""
        await self._chosen.wait()
        return self._stage


async def found(
    directory: Directory, signed: SignedManifest, me: PeerId
) -> dict[PeerId, SignedRecord] | None:
    """Return the records of the other peers; None if the directory does not answer."""
    try:
        records = await look(directory, signed.run_id, len(signed.manifest.stages))
    except WireError:
        return None
    return {peer: record for peer, record in records.items() if peer != me}


def run_line(signed: SignedManifest) -> str:
    manifest = signed.manifest
    stages = len(manifest.stages)
    return (
        f"run    {printable(manifest.name)}  {signed.run_id[:16]}...  signed by {manifest.owner}; "
        + counted(stages, "stage")
    )


def swarm_line(records: Mapping[PeerId, SignedRecord] | None) -> str:
    """Return a line about the peers in the swarm, from their records."""
    if records is None:
        return "swarm  the directory does not answer yet; this peer tries again while it works"
    workers = [signed.record for signed in records.values() if signed.record.stage >= 0]
    training = [record for record in workers if record.state in ("training", "")]
    if not workers:
        return "swarm  no other peer is there yet: this peer is the first"
    words = [f"swarm  {counted(len(workers), 'peer')}, {len(training)} training"]
    if training:
        words.append(f"round {int(median(record.round for record in training))}")
    losses = [record.loss for record in training if record.loss is not None]
    if losses:
        words.append(f"loss {median(losses):.3f}")
    return ", ".join(words) + " (as reported)"


def machine_line(
    needs: Needs, graphs: int, allowed: int, limited: bool, device: str, computing: Computing
) -> str:
    """Return a line about the memory that the stage needs on this machine."""
    whose = "limits.memory allows" if limited else "this machine has"
    most = needs.least + (graphs - 1) * needs.graph
    return (
        f"you    stage {needs.stage} on {device} in {computing.dtype}: needs {gib(needs.least)} with one "
        f"microbatch under way and {gib(most)} with the most, {graphs} at a time; {whose} {gib(allowed)}"
    )


async def pace_of(tokens: Callable[[], int], least: int) -> float:
    """Return the tokens per second that this machine commits, over the first PACE_SECONDS, or longer if
    `least` tokens take longer. `tokens()` is the committed count, which restarts when the peer changes its
    stage."""
    clock = asyncio.get_running_loop().time
    began, first = clock(), tokens()
    while True:
        await asyncio.sleep(1.0)
        done = tokens() - first
        if done <= 0:  # No progress yet: other peers are missing, or the text is being read.
            began, first = clock(), tokens()
        elif done >= least and clock() - began >= PACE_SECONDS:
            return done / (clock() - began)


def traffic_line(
    manifest: Manifest,
    stage: int,
    pace: float,
    records: Mapping[PeerId, SignedRecord] | None,
    limits: LimitsFile,
) -> str:
    """Return a line about the expected traffic at this pace, in tokens per second."""
    others = [s.record for s in (records or {}).values() if s.record.stage >= 0]
    traffic = traffic_of(manifest, stage, pace, 1 + sum(record.stage == stage for record in others))
    received, share = traffic.received, share_of_day(limits)
    sent = traffic.sent if limits.upload is None else min(traffic.sent, limits.upload)
    if sent + received == 0.0:
        return f"will   send next to nothing until others are there{_bounds(limits)}"
    up, down, total = amount(sent * 3600), amount(received * 3600), sent + received
    return (
        f"will   send at most about {up} and receive {down} an hour "
        f"at its pace so far ({pace:,.0f} tokens/s), "
        f"{amount(total * share * MONTH_SECONDS)} in all if it works through a month{_bounds(limits)}"
    )


def share_of_day(limits: LimitsFile) -> float:
    """Return the share of the day (0 to 1) in which the hours of the limits allow work."""
    when = limits.when
    return 1.0 if when is None else sum(map(when.allow, range(DAY_MINUTES))) / DAY_MINUTES


def _bounds(limits: LimitsFile) -> str:
    words = []
    if limits.upload is not None:
        words.append(f"never more than {amount(limits.upload)}/s up")
    if limits.hours is not None:
        words.append(f"only at {limits.hours} (it is {time.strftime('%H:%M')} now)")
    if limits.only_when_idle:
        busy = limits.share_when_busy
        less = f"{busy:.0%} of the time while something else needs this machine"
        words.append(less if busy else "only while nothing else needs this machine")
    if limits.only_when_plugged_in:
        words.append("not on battery")
    return "; " + "; ".join(words) if words else ""
