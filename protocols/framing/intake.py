"""Limit the memory that incomplete messages of other peers occupy, for each peer and in total.

A message is incomplete until its last byte has come; its bytes are held until then. `Terms` limits the size
of one message. swarmnet/resources/allowances.py limits the total of incomplete ones.
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
        self, *, intake: Intake, number: int, peer: PeerId, slot: ReceiverSlot, end_stream: Callable[[], None]
    ) -> None:
        """Create the inflow of stream `number` of `intake`, which `peer` opened. `slot` has the receiver and
        its limits, and `end_stream` closes the stream."""
        self.peer = peer
        self.frames = FrameReader(self._limit)
        self.error: WireError | None = None
        """Why the stream was cut, or None."""
        self.waiting_bytes = 0
        """Bytes that were read but not consumed yet."""
        self._intake = intake
        self._number = number
        self._slot = slot
        self._end_stream = end_stream
        self._greeted = False
        self._reported_bytes = 0
        """Number of held bytes last reported to the intake."""

    def greeted(self) -> bool:
        """Return True if the sender has sent `Hello`, even if it has said `Bye` since. After a `Bye` on one
        link, last messages still arrive on others, and the sender must not be blamed for them."""
        self._greeted = self._greeted or self._slot.terms.greeted(self.peer)
        return self._greeted

    def _limit(self, message: Message) -> int:
        return self._slot.terms.bodies.get(type(message), 0) if self.greeted() else 0

    def count(self) -> None:
        """Report the number of held bytes to the intake if it has changed. The intake cuts the streams of
        peers that hold too many. Messages that arrive complete do not change the number."""
        held = self.frames.held_bytes + self.waiting_bytes
        if held != self._reported_bytes:
            self._reported_bytes = held
            self._intake.holds(self._number, held, self._slot.terms.longest)

    def cut(self, reason: str) -> None:
        """Free all held bytes at once and end the stream. The code that reads it finds `error`."""
        self.error = Backlog(reason)
        self.end()
        self._end_stream()

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

    def open(self, peer: PeerId, slot: ReceiverSlot, end_stream: Callable[[], None]) -> Inflow:
        """Return the inflow of a new stream from a peer. `end_stream` is called if the stream is cut."""
        number = next(self._numbers)
        inflow = Inflow(intake=self, number=number, peer=peer, slot=slot, end_stream=end_stream)
        self._inflows[number] = inflow
        return inflow

    def holds(self, number: int, held: int, longest: int) -> None:
        """Record that stream `number` now holds `held` bytes of incomplete messages, and cut the streams that
        exceed the limits; these may be others. `longest` is the largest body that its receiver accepts."""
        inflow = self._inflows.get(number)
        if inflow is None:  # The stream has ended.
            return
        streams_to_cut = self.unfinished.hold(inflow.peer, number, held, longest)
        for stream in streams_to_cut:
            exceeding = self._inflows.get(stream)
            if exceeding is not None:
                unfinished_bytes = self.unfinished.of(exceeding.peer)
                exceeding.cut(f"{unfinished_bytes} bytes of its messages are unfinished")

    def forget(self, number: int) -> None:
        """Forget a stream that has ended."""
        inflow = self._inflows.pop(number, None)
        if inflow is not None:
            self.unfinished.hold(inflow.peer, number, 0, 0)
