"""The links that this peer has opened to its neighbours, by lane: what is sent goes through here."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from peers.telemetry import events as noted
from protocols.errors import WireError
from protocols.fields import Body
from protocols.messages.table import Hello, Lane, Message
from protocols.ports import Link, Transport
from swarmnet.identifiers import PeerId

DIAL_SECONDS = 8.0
"""p2pd answers within 2 ms when refused, in 5 s when an address is silent (measured)."""
DRAIN_SECONDS = 0.5
"""What was said last gets this long to leave before the links end."""
MOST_WAITING = 64
"""Long bodies that wait for their lane to open; who asks for more at once asks again."""
LANES: tuple[Lane, ...] = ("group", "data", "bulk")


@dataclass(slots=True)
class Traffic:
    """Bytes on the wire by message kind, framing included."""

    sent: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)


class Lanes:
    """Each link begins with a Hello. The lane for long bodies is opened when first needed."""

    def __init__(
        self,
        transport: Transport,
        sent: Counter[str],
        hello: Callable[[], Hello],
        addresses: Callable[[PeerId], Sequence[str]],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
        note: noted.Note,
    ) -> None:
        """`sent` counts bytes by message kind; `spawn` runs a task that ends with the neighbourhood."""
        self.transport = transport
        self.sent = sent
        self.hello = hello
        self.addresses = addresses
        self.spawn = spawn
        self.note = note
        self.waiting: dict[PeerId, list[tuple[Message, Body]]] = {}
        """Long bodies, until their lane stands."""
        self._links: dict[tuple[PeerId, Lane], Link] = {}
        self._opening: set[tuple[PeerId, Lane]] = set()
        self._closed = False

    def peers(self) -> list[PeerId]:
        """To whom something can be said."""
        return [peer for peer, lane in self._links if lane == "group"]

    def post(self, peer: PeerId, lane: Lane, message: Message, body: Body = b"") -> bool:
        """Send if there is a link on that lane; False if not (the caller's deadline will tell it)."""
        link = self._links.get((peer, lane))
        if link is None or link.closed:
            if lane != "bulk" or (peer, "group") not in self._links:
                return False
            waiting = self.waiting.setdefault(peer, [])
            if len(waiting) >= MOST_WAITING:
                return False
            waiting.append((message, body))
            if len(waiting) == 1:
                self.spawn(self._open_bulk(peer))
            return True
        return self._post(link, message, body)

    def queued_bytes(self, peer: PeerId, lane: Lane) -> int:
        """What waits to be sent there; 0 without a link."""
        link = self._links.get((peer, lane))
        return link.queued_bytes if link is not None else 0

    async def open(self, peer: PeerId, lane: Lane) -> bool:
        """A link on one lane, greeted. False if the peer was not reached."""
        if self._stands(peer, lane):
            return True
        self._opening.add((peer, lane))
        try:
            link = await self.transport.open(peer, lane, DIAL_SECONDS, self.addresses(peer))
        except WireError as error:
            self.note(noted.DialFailed(peer=peer, lane=lane, code=error.code, reason=str(error)))
            return False
        finally:
            self._opening.discard((peer, lane))
        if self._closed or self._stands(peer, lane):
            link.close()
            return not self._closed
        self._links[(peer, lane)] = link
        return self._post(link, self.hello())

    def ended(self, peer: PeerId, lane: Lane) -> bool:
        """A link on that lane has ended, in one direction or the other: whether the peer is lost with it."""
        if (peer, lane) in self._opening:
            return False
        if lane == "bulk":  # Opened for one snapshot, and again for the next.
            link = self._links.get((peer, lane))
            if link is not None and link.closed:
                del self._links[(peer, lane)]
            return False
        return True

    def drop(self, peer: PeerId) -> None:
        """End all links to a peer."""
        for lane in LANES:
            link = self._links.pop((peer, lane), None)
            if link is not None:
                link.close()

    async def close(self, last: Sequence[Message]) -> None:
        """Say `last` to everybody and end all links."""
        self._closed = True
        for peer in self.peers():
            for message in last:
                self._post(self._links[peer, "group"], message)
        drains = [link.drained(0, DRAIN_SECONDS) for link in self._links.values()]
        try:
            await asyncio.gather(*drains, return_exceptions=True)  # PeerGone: it left first.
        finally:  # Also when a pause cuts this short.
            for link in self._links.values():
                link.close()
            self._links.clear()

    def _post(self, link: Link, message: Message, body: Body = b"") -> bool:
        try:
            self.sent[message.kind] += link.post(message, body)
        except WireError as error:
            self.note(noted.PostFailed(peer=link.peer, lane=link.lane, code=error.code, reason=str(error)))
            return False
        return True

    async def _open_bulk(self, peer: PeerId) -> None:
        """What was posted meanwhile has waited."""
        opened = await self.open(peer, "bulk")
        for message, body in self.waiting.pop(peer, []):
            if opened:
                self.post(peer, "bulk", message, body)

    def _stands(self, peer: PeerId, lane: Lane) -> bool:
        link = self._links.get((peer, lane))
        return link is not None and not link.closed
