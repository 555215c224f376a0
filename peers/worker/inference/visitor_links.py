"""Links back to inference clients: opened for the first answer, closed when no answer has been sent for a
while.

A client has no record and perhaps no address that can be dialled. The link therefore uses the connection on
which the client reached this peer, so a client works behind any router without listening.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from peers.network.one_off_replies import OneOffReplies
from peers.network.peer_links import PeerLinks
from peers.runtime.timer import Timer
from peers.telemetry import log_events
from protocols.errors import WireError
from protocols.fields import Body
from protocols.messages.table import ForwardDeclined, Hello, Message
from protocols.ports import Link
from protocols.signed.envelope import run_bytes
from swarmnet.identifiers import PeerId
from swarmnet.run.manifest import WIRE_VERSION

OPEN_SECONDS = 8.0
"""The same timeout as for any link (`channels.DIAL_SECONDS`)."""
IDLE_SECONDS = 60.0
MAX_VISITORS = 16
"""Links kept open at the same time. Other clients get each answer over a link of its own, which is then
closed (network/one_off_replies.py)."""
QUIET_SECONDS = 5.0
"""A client that got no answer for this long gives its place to a new client."""
MAX_WAITING = 16
"""Answers queued for one client while its link opens."""
LOOK_SECONDS = 10.0


@dataclass(slots=True)
class _Visitor:
    used_at: float
    link: Link | None = None
    waiting: list[tuple[Message, Body]] = field(default_factory=list)


class ClientLinks:
    def __init__(self, neighbourhood: PeerLinks, log_event: log_events.LogEvent) -> None:
        self.neighbourhood = neighbourhood
        self.log_event = log_event
        self._loop = asyncio.get_running_loop()
        sent = neighbourhood.traffic.sent
        self._strangers = OneOffReplies(
            transport=neighbourhood.transport, sent=sent, log_event=log_event, deadline_seconds=OPEN_SECONDS
        )
        self._visitors: dict[PeerId, _Visitor] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer = Timer(self._look)

    def __len__(self) -> int:
        return len(self._visitors)

    def post(self, peer: PeerId, message: Message, body: Body = b"") -> None:
        """Send a message once there is a link. A failure is logged; the client notices it by its deadline."""
        if not self.neighbourhood.is_visitor(peer):  # Links to members belong to `PeerLinks`.
            self.neighbourhood.post(peer, "data", message, body)
            return
        is_answer = not isinstance(message, ForwardDeclined)
        if peer not in self._visitors and len(self._visitors) >= MAX_VISITORS:
            loser = self._loser(peer) if is_answer else None
            if loser is None:
                self._spawn(self._strangers.answer(peer, message, body))
                return
            self._forget(loser)
        visitor = self._visitors.setdefault(peer, _Visitor(self._loop.time()))
        if is_answer:
            visitor.used_at = self._loop.time()
        if visitor.link is not None and not visitor.link.closed:
            self._send(visitor.link, message, body)
            return
        if len(visitor.waiting) < MAX_WAITING:
            visitor.waiting.append((message, body))
        if len(visitor.waiting) == 1:
            self._spawn(self._open(peer, visitor))
        self._timer.arm(visitor.used_at + LOOK_SECONDS)

    def is_gone(self, peer: PeerId) -> bool:
        """Return whether the link to this client has broken, so that no answer can arrive."""
        visitor = self._visitors.get(peer)
        return visitor is not None and visitor.link is not None and visitor.link.closed

    def close(self) -> None:
        self._timer.close()
        for task in self._tasks:
            task.cancel()
        for visitor in self._visitors.values():
            if visitor.link is not None:
                visitor.link.close()
        self._visitors.clear()

    async def _open(self, peer: PeerId, visitor: _Visitor) -> None:
        try:
            visitor.link = await self.neighbourhood.transport.open(peer, "data", OPEN_SECONDS)
        except WireError as error:
            self.log_event(log_events.ClientNotReached(peer=peer, code=error.code, reason=str(error)))
            self._visitors.pop(peer, None)
            return
        hello = Hello(WIRE_VERSION, run_bytes(self.neighbourhood.run_id), self.neighbourhood.record)
        waiting, visitor.waiting = visitor.waiting, []
        for message, body in [(hello, b""), *waiting]:
            self._send(visitor.link, message, body)

    def _send(self, link: Link, message: Message, body: Body) -> None:
        try:
            self.neighbourhood.traffic.sent[message.kind] += link.post(message, body)
        except WireError as error:
            self.log_event(
                log_events.PostFailed(peer=link.peer, lane=link.lane, code=error.code, reason=str(error))
            )

    def _look(self) -> None:
        now = self._loop.time()
        for peer, visitor in list(self._visitors.items()):
            if visitor.used_at + IDLE_SECONDS <= now and not visitor.waiting:
                self._forget(peer)
        if self._visitors:
            self._timer.arm(now + LOOK_SECONDS)

    def _loser(self, newcomer: PeerId) -> PeerId | None:
        """Return the client that loses its place to `newcomer`, or None.

        It is the client answered longest ago, if that was long enough ago. Otherwise it is the oldest of the
        address range with most clients, if the newcomer's range has fewer."""
        times = {peer: each.used_at for peer, each in self._visitors.items() if not each.waiting}
        oldest = min(times, key=times.__getitem__, default=None)
        if oldest is None or times[oldest] + QUIET_SECONDS <= self._loop.time():
            return oldest
        counts = Counter(map(self._range_of, self._visitors))
        range, count = counts.most_common(1)[0]
        if count <= counts[self._range_of(newcomer)] + 1:
            return None
        of_range = [peer for peer in times if self._range_of(peer) == range]
        return min(of_range, key=times.__getitem__, default=None)

    def _range_of(self, peer: PeerId) -> str:
        return self.neighbourhood.transport.seen_range(peer) or peer

    def _forget(self, peer: PeerId) -> None:
        link = self._visitors.pop(peer).link
        if link is not None:
            link.close()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
