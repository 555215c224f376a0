"""Draw the swarm as the directory shows it, again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import replace

from rich.console import Console

from peers.network.discovery.record_reader import look
from peers.network.discovery.visitor_session import RunConnection
from peers.stageless.observer.order_reader import Orders
from peers.stageless.observer.sightings import PeerObservations
from peers.stageless.observer.snapshot_of_records import snapshot_of
from peers.telemetry.snapshot import Curve, SwarmSnapshot
from peers.tools.top import screen
from peers.tools.top.keys import Keys
from peers.tools.top.run_screen import FRAME_SECONDS, LEAVE, framed, live
from protocols.errors import WireError
from protocols.signed.records import SignedRecord
from swarmnet.identifiers import PeerId

DIRECTORY_SECONDS = 5.0
"""Seconds between two look-ups; records change every 30 s, or when a peer's state does."""


async def swarm(console: Console, found: RunConnection) -> None:
    """Draw what the directory shows of the run until cancelled."""
    looks = snapshots(found)
    async with aclosing(looks):
        if not console.is_terminal:
            console.print(screen.frame(await anext(looks), console))
            return
        with Keys() as keys, live(console) as display:
            async for snapshot in looks:
                until = time.monotonic() + DIRECTORY_SECONDS
                while time.monotonic() < until:
                    display.update(framed(snapshot, console, LEAVE), refresh=True)
                    if "q" in await asyncio.to_thread(keys.pressed, FRAME_SECONDS):
                        return


async def snapshots(found: RunConnection) -> AsyncGenerator[SwarmSnapshot]:
    """Yield one snapshot after another. While the directory does not answer, the last one stays."""
    signed, directory = found.signed, found.directory
    sightings, losses = PeerObservations(len(signed.manifest.stages)), Curve[float]()
    orders = Orders(signed, lambda _: None, sightings.events.append)
    records = await _look(found, orders)
    while True:
        now = directory.now()
        for each in records.values():
            sightings.recorded(each, now)
        sightings.walked()
        sightings.look(now)
        snapshot = snapshot_of(sightings, signed, now, orders.ordered)
        if snapshot.loss is not None:
            losses.add(now, snapshot.loss)
        yield replace(snapshot, losses=tuple(loss for _, loss in losses.points))
        with suppress(WireError):
            records = await _look(found, orders)


async def _look(found: RunConnection, orders: Orders) -> dict[PeerId, SignedRecord]:
    """Look up records and orders at the same time, so that the user waits only once."""
    stages = len(found.signed.manifest.stages)
    records, _ = await asyncio.gather(
        look(found.directory, found.signed.run_id, stages), orders.look(found.directory)
    )
    return records
