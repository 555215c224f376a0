"""The transports of one process: links between them do not leave it.

Each still is a peer of its own to the other: greeted, checked and lost like any. What goes over such a link
is cut in frames and bounded as everywhere, and counted as nothing: nobody's line carries it.
"""

from __future__ import annotations

import asyncio
from functools import partial

from protocols.fields import Body
from protocols.framing.frames import FrameReader
from protocols.framing.send_queue import Ear, InnerLink, deliver
from protocols.messages.table import Lane, Message
from protocols.ports import Receiver
from swarmnet.identifiers import PeerId

EXACT_TIMES = 8
"""Between siblings hidden states go as they were computed, in 4 bytes a number; the smallest codec has 0.6
(swarmnet/run/activation_sizes.py)."""


class Near:
    """One per process. A peer is in it while it listens and its own p2pd runs."""

    def __init__(self) -> None:
        self._ears: dict[PeerId, Ear] = {}
        self._links: dict[NearLink, PeerId] = {}
        """And who opened it."""

    def enter(self, peer: PeerId, ear: Ear) -> None:
        """It listens; `ear` takes the place of the one before it."""
        self._ears[peer] = ear

    def leave(self, peer: PeerId, reason: str) -> None:
        """It is gone: links from it and to it end, and the other side of each is told."""
        if self._ears.pop(peer, None) is None:
            return
        for link, opener in list(self._links.items()):
            if peer in (opener, link.peer):
                link.end(reason, tell_opener=opener != peer)

    def holds(self, peer: PeerId) -> bool:
        """Whether a link to this peer can be opened here."""
        return peer in self._ears

    def open(self, opener: PeerId, peer: PeerId, lane: Lane, backlog_bytes: int) -> NearLink:
        """A link to a peer that is held here."""
        link = NearLink(self, opener, peer, lane, EXACT_TIMES * backlog_bytes)
        self._links[link] = opener
        return link

    def receiver(self, peer: PeerId) -> Receiver | None:
        ear = self._ears.get(peer)
        return ear.receiver if ear is not None else None

    def limit(self, opener: PeerId, peer: PeerId, message: Message) -> int:
        """The longest body that `peer` takes of `opener` with this message."""
        ear = self._ears.get(peer)
        return EXACT_TIMES * ear.terms.limit(opener, message) if ear is not None else 0

    def forget(self, link: NearLink) -> None:
        """It has ended."""
        self._links.pop(link, None)


class NearLink(InnerLink):
    """From one peer of this process to another."""

    def __init__(self, near: Near, opener: PeerId, peer: PeerId, lane: Lane, backlog_bytes: int) -> None:
        super().__init__(peer, lane, backlog_bytes)
        self._near, self._opener = near, opener
        self._reader = FrameReader(partial(near.limit, opener, peer))

    def close(self) -> None:
        if self._finish("closed by us"):
            self._lose(self.peer, self._opener, "closed by the other side")

    def end(self, reason: str, tell_opener: bool) -> None:
        """One side is gone: tell the other."""
        if self._finish(reason):
            if tell_opener:
                self._lose(self._opener, self.peer, reason)
            else:
                self._lose(self.peer, self._opener, reason)

    def _lose(self, told: PeerId, other: PeerId, reason: str) -> None:
        """Later: whoever closes a link does not expect to be called meanwhile."""
        receiver = self._near.receiver(told)
        if receiver is not None:
            asyncio.get_running_loop().call_soon(receiver.lost, other, self.lane, reason)

    def _queue(self, message: Message, body: Body) -> int:
        super()._queue(message, body)
        return 0

    def _drop(self) -> None:
        super()._drop()
        self._reader.close()
        self._near.forget(self)

    def _carry(self, piece: bytes) -> None:
        receiver = self._near.receiver(self.peer)
        if self.closed or receiver is None:
            return
        refusal = deliver(receiver, self._opener, self.lane, self._reader.take(piece), counted=False)
        if refusal is not None and self._finish(str(refusal)):
            receiver.refused(self._opener, refusal.code, str(refusal))
            self._lose(self._opener, self.peer, "it ended")
