"""Contributions that neighbours want, handed out no faster than their lines carry them.

Where contributions are made faster than a line carries them, what was asked for would pile up in the link's
queue (64 MiB of 605 KB contributions, measured at 2.7 Mbit/s), most of it long settled when it arrives, and
some of it twice because it was asked for again. So little is queued at a time; the rest waits here as names,
each once, and is looked up when its turn comes: what is settled by then is not sent any more.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from peers.runtime.timer import HasTime, Timer
from swarmnet.identifiers import PeerId

Item = TypeVar("Item", bound=Hashable)
"""How what is wanted is named."""

QUEUE_BYTES = 256 * 1024
"""More is posted while less than this is queued: 0.8 s of what 1 % loss leaves a connection at 50 ms."""
LOOK_SECONDS = 0.1
"""How often a full queue is looked at: 33 KB go out meanwhile on such a connection."""


class UploadQueue(Generic[Item]):
    """What is still to be sent to whom."""

    def __init__(
        self,
        send: Callable[[PeerId, Item], None],
        queued_bytes: Callable[[PeerId], int],
        clock: HasTime,
    ) -> None:
        """`send` posts what is wanted, if it is still kept; `queued_bytes` is what waits on the link."""
        self._send = send
        self._queued_bytes = queued_bytes
        self._clock = clock
        self._wanted: dict[PeerId, dict[Item, None]] = {}
        self._timer = Timer(self._pour, clock)

    def __len__(self) -> int:
        return sum(map(len, self._wanted.values()))

    def wanted(self, peer: PeerId, ids: Iterable[Item]) -> None:
        """`peer` asks for these; what it asks for again waits in its old place."""
        waiting = self._wanted.setdefault(peer, {})
        for identity in ids:
            waiting.setdefault(identity)
        self._pour()

    def left(self, peer: PeerId) -> None:
        self._wanted.pop(peer, None)

    def close(self) -> None:
        self._timer.close()

    def _pour(self) -> None:
        for peer, waiting in list(self._wanted.items()):
            while waiting and self._queued_bytes(peer) < QUEUE_BYTES:
                identity = next(iter(waiting))
                del waiting[identity]
                self._send(peer, identity)
            if not waiting:
                del self._wanted[peer]
        self._timer.arm(self._clock.time() + LOOK_SECONDS if self._wanted else float("inf"))
