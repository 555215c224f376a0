"""Send contributions that neighbours requested no faster than their links carry them.

Where contributions are made faster than a link carries them, requested ones would fill the link's queue. 64
MiB of 605 KB contributions were measured at 2.7 Mbit/s. Most would be long settled on arrival, and some would
be sent twice because they were requested again. So little is queued at a time. The rest waits here as ids,
each once; a contribution that has settled by its turn is not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from peers.runtime.timer import HasTime, Timer
from swarmnet.identifiers import PeerId

Item = TypeVar("Item", bound=Hashable)
"""The name of a requested item."""

QUEUE_BYTES = 256 * 1024
"""More is posted while less than this is queued: 0.8 s on a connection with 1 % loss and 50 ms round trip."""
LOOK_SECONDS = 0.1
"""Interval for checking a full queue; such a connection sends 33 KB meanwhile."""


class UploadQueue(Generic[Item]):
    """Items still to be sent, by peer."""

    def __init__(
        self,
        send: Callable[[PeerId, Item], None],
        queued_bytes: Callable[[PeerId], int],
        clock: HasTime,
    ) -> None:
        """`send` posts an item if it is still kept; `queued_bytes` returns the bytes queued on the link."""
        self._send = send
        self._queued_bytes = queued_bytes
        self._clock = clock
        self._wanted: dict[PeerId, dict[Item, None]] = {}
        self._timer = Timer(self._send_next, clock)

    def __len__(self) -> int:
        return sum(map(len, self._wanted.values()))

    def wanted(self, peer: PeerId, ids: Iterable[Item]) -> None:
        """Queue the items that `peer` requests; a repeated request keeps its old place."""
        waiting = self._wanted.setdefault(peer, {})
        for identity in ids:
            waiting.setdefault(identity)
        self._send_next()

    def left(self, peer: PeerId) -> None:
        self._wanted.pop(peer, None)

    def close(self) -> None:
        self._timer.close()

    def _send_next(self) -> None:
        for peer, waiting in list(self._wanted.items()):
            while waiting and self._queued_bytes(peer) < QUEUE_BYTES:
                identity = next(iter(waiting))
                del waiting[identity]
                self._send(peer, identity)
            if not waiting:
                del self._wanted[peer]
        self._timer.arm(self._clock.time() + LOOK_SECONDS if self._wanted else float("inf"))
