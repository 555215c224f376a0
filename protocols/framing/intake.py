"""Limit the memory that incomplete messages of other peers occupy, for each peer and in total.

The receiver's terms (messages/terms.py) limit the size of a message. swarmnet/resources/allowances.py limits
the total of incomplete ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from protocols.errors import Backlog, WireError
from protocols.framing.frames import FrameReader
from protocols.framing.send_queue import ReceiverSlot
from protocols.messages.table import Message
from swarmnet.identifiers import PeerId
from swarmnet.resources.allowances import Checks, Unfinished


class Inflow:
    """One incoming stream: its frame reader and the unfinished bytes that it holds. The code that reads the
    stream must call `count` after each read."""

    def __init__(
        self, intake: Intake, number: int, peer: PeerId, ear: ReceiverSlot, cut: Callable[[], None]
    ) -> None:
        self.peer = peer
        self.frames = FrameReader(self._limit)
        self.error: WireError | None = None
        """Why the stream was cut, or None."""
        self.waiting_bytes = 0
        """Bytes that were read but not consumed yet."""
        self._intake, self._number, self._ear, self._cut = intake, number, ear, cut
        self._greeted = False
        self._held = 0
        """Number of held bytes last reported to the intake."""

    def greeted(self) -> bool:
        """Return True if the sender has sent `Hello`. The answer stays True. After a `Bye` on one lane, last
        messages still arrive on others, and the sender must not be blamed for them."""
        self._greeted = self._greeted or self._ear.terms.greeted(self.peer)
        return self._greeted

    def _limit(self, message: Message) -> int:
        return self._ear.terms.bodies.get(type(message), 0) if self.greeted() else 0

    def count(self) -> None:
        """Report the bytes held now. The intake cuts the streams of peers that hold too much. Messages that
        arrive complete do not change the number."""
        held = self.frames.held_bytes + self.waiting_bytes
        if held != self._held:
            self._held = held
            self._intake.holds(self._number, held, self._ear.terms.longest)

    def cut(self, reason: str) -> None:
        """Free all held bytes at once and end the stream. The code that reads it finds `error`."""
        self.error = Backlog(reason)
        self.end()
        self._cut()

    def end(self) -> None:
        """Accept nothing more."""
        self.frames.close()
        self._intake.forget(self._number)


class Intake:
    """All incoming streams of one transport."""

    def __init__(self) -> None:
        self.unfinished = Unfinished()
        self.checks = Checks()
        self.closed = False
        self._inflows: dict[int, Inflow] = {}
        self._numbers = itertools.count()

    def open(self, peer: PeerId, ear: ReceiverSlot, cut: Callable[[], None]) -> Inflow:
        """Return the intake of one stream of a peer. `cut` is called to end the stream."""
        number = next(self._numbers)
        inflow = self._inflows[number] = Inflow(self, number, peer, ear, cut)
        return inflow

    def holds(self, number: int, held: int, longest: int) -> None:
        """Record that a stream now holds `held` bytes, and cut the streams that exceed the limits."""
        inflow = self._inflows.get(number)
        if inflow is None:
            return
        for stream in self.unfinished.hold(inflow.peer, number, held, longest):
            cut = self._inflows.get(stream)
            if cut is not None:
                cut.cut(f"{self.unfinished.of(cut.peer)} bytes of its messages are unfinished")

    def forget(self, number: int) -> None:
        """Forget a stream that has ended."""
        inflow = self._inflows.pop(number, None)
        if inflow is not None:
            self.unfinished.hold(inflow.peer, number, 0, 0)
