"""Give slow links more bandwidth, by opening more streams of a link over separate connections (subflows).

A carrier is an extra p2pd process of this peer, started on demand, whose connections are its own. Each
subflow of a link goes over another carrier (multipath_link.py, carriers.py)."""

from __future__ import annotations

import asyncio
from collections import Counter

from protocols.daemon.p2pd import DAEMON_ERRORS, LOOPBACK, Daemon
from protocols.errors import CannotStart, PeerGone, Unreachable
from protocols.p2pd.carriers import Carriers, introduction
from protocols.p2pd.multipath_link import P2pdLink
from protocols.signed.identity import Identity
from swarmnet.run.schema import WIRE_VERSION

SUBFLOW_PROTOCOL = f"/swarmnet/{WIRE_VERSION}/subflow"
MAX_CARRIERS = 2
"""Maximum number of carriers, so a link has at most three streams. A carrier takes about 60 MB.

At 2.7 Mbit/s each, three connections to each of three neighbours carry more than a home uplink."""
DIAL_SECONDS = 8.0
RETRY_SECONDS = 60.0
"""Pause in seconds after a failure: no carrier started, a subflow broke, or a neighbour was not reached. For
example, a neighbour behind a router can dial us, but our carriers cannot dial it."""


class SubflowDialer:
    """Opens the subflows of one transport."""

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self._carriers = Carriers(LOOPBACK)
        self._tasks: dict[P2pdLink, asyncio.Task[None]] = {}
        self._starting = asyncio.Lock()
        self._clock = asyncio.get_running_loop().time
        self.counted: Counter[str] = Counter()
        """Counts of subflows `opened`, attempts that `failed`, and messages `repeated` by former links."""

    @property
    def carriers(self) -> int:
        return len(self._carriers.running)

    def want(self, link: P2pdLink) -> None:
        """Open one more subflow for a slow link, in the background. Do nothing while one is being opened, for
        `RETRY_SECONDS` after a failure, without a known address, or if the link has all it may have."""
        if link in self._tasks or not link.addresses or self._clock() < link.broke_at + RETRY_SECONDS:
            return
        task = asyncio.create_task(self._open(link), name=f"subflow {link.peer}")
        self._tasks[link] = task
        task.add_done_callback(lambda _task: self._tasks.pop(link, None))

    def forget(self, link: P2pdLink) -> None:
        """Handle the end of a link: count the messages it repeated, and cancel a subflow being opened."""
        self.counted["repeated"] += link.repeated
        link.repeated = 0
        task = self._tasks.get(link)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._carriers.close()

    async def _open(self, link: P2pdLink) -> None:
        """Open one subflow over a carrier that the link does not use yet, and add it to the link. A failure
        is counted, and its time is noted in the link. If the link ended meanwhile, the stream is cut."""
        try:
            carrier = await self._unused_carrier(link)
            if carrier is None:
                return  # The link has all the subflows that it may have.
            await carrier.connect(link.peer, link.addresses, DIAL_SECONDS)
            reader, writer = await carrier.open_stream(link.peer, SUBFLOW_PROTOCOL, DIAL_SECONDS)
        except (PeerGone, Unreachable, CannotStart, *DAEMON_ERRORS):
            self.counted["failed"] += 1
            link.broke_at = self._clock()
            return
        if link.closed:
            writer.transport.abort()
            return
        writer.write(introduction(self._identity, carrier.peer, link.peer))
        link.add(carrier.peer, (reader, writer))
        self.counted["opened"] += 1

    async def _unused_carrier(self, link: P2pdLink) -> Daemon | None:
        """Return a carrier that the link does not use yet, starting one if needed. Returns None if the link
        uses all and no more may be started. Raises CannotStart."""
        async with self._starting:
            for carrier in self._carriers.running:
                if carrier.peer not in link.carriers:
                    return carrier
            if len(self._carriers.running) >= MAX_CARRIERS:
                return None
            (carrier,) = await self._carriers.start(1)
            return carrier
