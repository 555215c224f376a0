"""The links that this peer opened to its neighbours. All its messages are sent here.

A link carries messages one way, to one peer and on one lane. The lanes are `group` for rounds and membership,
`data` for microbatches, and `bulk` for long bodies (pieces of snapshots)."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from peers.telemetry import log_events
from protocols.errors import WireError
from protocols.fields import Body
from protocols.messages.table import Hello, Lane, Message
from protocols.ports import Link, Transport
from swarmnet.identifiers import PeerId

DIAL_SECONDS = 8.0
"""Timeout of a dial in seconds. p2pd answers within 2 ms if refused, in 5 s if an address is silent
(measured)."""
DRAIN_SECONDS = 0.5
"""Seconds that the last messages have to be sent before the links end."""
MAX_WAITING = 64
"""Maximum number of long bodies that wait for their lane to open; further requests must be repeated."""
LANES: tuple[Lane, ...] = ("group", "data", "bulk")


@dataclass(slots=True)
class TrafficCounters:
    """Bytes on the wire by message kind, framing included; refused messages, by code."""

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    departures: Counter[str] = field(default_factory=Counter)
    """Number of peers that went, by code."""


@dataclass(eq=False, kw_only=True)
class LinkPool:
    """The links of this peer by (peer, lane). Each begins with `Hello`; the bulk lane is opened on demand.
    `sent` counts bytes by message kind."""

    transport: Transport
    sent: Counter[str]
    hello: Callable[[], Hello]
    addresses: Callable[[PeerId], Sequence[str]]
    log_event: log_events.LogEvent

    def __post_init__(self) -> None:
        self.waiting: dict[PeerId, list[tuple[Message, Body]]] = {}
        """Long bodies that wait for their lane to open."""
        self._links: dict[tuple[PeerId, Lane], Link] = {}
        self._opening: set[tuple[PeerId, Lane]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.closed = False

    def peers(self) -> list[PeerId]:
        """Return the peers to which messages can be sent."""
        return [peer for peer, lane in self._links if lane == "group"]

    def post(self, peer: PeerId, lane: Lane, message: Message, body: Body = b"") -> bool:
        """Send a message if there is a link on that lane. Returns False if it cannot be sent. Without a bulk
        link to a linked peer, the message waits while one is opened, and True is returned. If that fails, the
        message is lost: the caller needs its own deadline."""
        link = self._links.get((peer, lane))
        if link is None or link.closed:
            if lane != "bulk" or (peer, "group") not in self._links:
                return False
            waiting = self.waiting.setdefault(peer, [])
            if len(waiting) >= MAX_WAITING:
                return False
            waiting.append((message, body))
            if len(waiting) == 1:  # For later messages the link is being opened already.
                self.spawn(self._open_bulk(peer))
            return True
        return self._post(link, message, body)

    def queued_bytes(self, peer: PeerId, lane: Lane) -> int:
        """Return the bytes queued for this peer on that lane; 0 without a link."""
        link = self._links.get((peer, lane))
        return link.queued_bytes if link is not None else 0

    async def open(self, peer: PeerId, lane: Lane) -> bool:
        """Open a link on one lane and send `Hello`, unless there is one. Returns False if the peer was not
        reached, if `Hello` cannot be sent, or if this pool was closed meanwhile."""
        if self._is_open(peer, lane):
            return True
        self._opening.add((peer, lane))
        try:
            link = await self.transport.open(peer, lane, DIAL_SECONDS, self.addresses(peer))
        except WireError as error:
            self.log_event(log_events.DialFailed(peer=peer, lane=lane, code=error.code, reason=str(error)))
            return False
        finally:
            self._opening.discard((peer, lane))
        if self.closed:
            link.close()
            return False
        if self._is_open(peer, lane):  # Another call has opened one meanwhile.
            link.close()
            return True
        self._links[(peer, lane)] = link
        return self._post(link, self.hello())

    def ended(self, peer: PeerId, lane: Lane) -> bool:
        """Handle the end of a link of one lane, to the peer or from it. Returns True if the peer counts as
        lost. It does not if this pool is opening that lane again, nor if the lane is `bulk`: such a link ends
        after each snapshot."""
        if (peer, lane) in self._opening:
            return False
        if lane == "bulk":
            link = self._links.get((peer, lane))
            if link is not None and link.closed:
                del self._links[(peer, lane)]
            return False
        return True

    def drop(self, peer: PeerId) -> None:
        for lane in LANES:
            link = self._links.pop((peer, lane), None)
            if link is not None:
                link.close()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task until this pool closes; once it is closed, do nothing."""
        if self.closed:
            work.close()
            return
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, last: Sequence[Message]) -> None:
        """Send the messages `last` to all peers, wait at most `DRAIN_SECONDS` for them, end all links and
        cancel all tasks."""
        self.closed = True
        for peer in self.peers():
            for message in last:
                self._post(self._links[peer, "group"], message)
        drains = [link.drained(0, DRAIN_SECONDS) for link in self._links.values()]
        try:
            await asyncio.gather(*drains, return_exceptions=True)  # PeerGone: the peer left first.
        finally:  # Also if this task is cancelled.
            for link in self._links.values():
                link.close()
            self._links.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _post(self, link: Link, message: Message, body: Body = b"") -> bool:
        """Send a message on this link and count its bytes. Returns False, and logs why, if that fails."""
        try:
            self.sent[message.kind] += link.post(message, body)
        except WireError as error:
            self.log_event(
                log_events.PostFailed(peer=link.peer, lane=link.lane, code=error.code, reason=str(error))
            )
            return False
        return True

    async def _open_bulk(self, peer: PeerId) -> None:
        """Open the bulk lane and send the messages that waited for it."""
        opened = await self.open(peer, "bulk")
        for message, body in self.waiting.pop(peer, []):
            if opened:
                self.post(peer, "bulk", message, body)

    def _is_open(self, peer: PeerId, lane: Lane) -> bool:
        link = self._links.get((peer, lane))
        return link is not None and not link.closed
