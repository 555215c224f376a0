"""What others send and is not whole yet, bounded for each of them and for all together.

How long a message may be are the receiver's terms (messages/terms.py), how much may be unfinished
swarmnet/resources/allowances.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from protocols.errors import Backlog, WireError
from protocols.framing.frames import FrameReader
from protocols.framing.send_queue import Ear
from protocols.messages.table import Message
from swarmnet.identifiers import PeerId
from swarmnet.resources.allowances import Checks, Unfinished


class Inflow:
    """One stream: the reader of its frames, and what it holds of unfinished messages. Whoever reads calls
    `count` after each read."""

    def __init__(self, intake: Intake, number: int, peer: PeerId, ear: Ear, cut: Callable[[], None]) -> None:
        self.peer = peer
        self.frames = FrameReader(self._limit)
        self.error: WireError | None = None
        """Why it was cut."""
        self.waiting_bytes = 0
        """Read, and not taken yet."""
        self._intake, self._number, self._ear, self._cut = intake, number, ear, cut
        self._greeted = False
        self._held = 0
        """As it was told to the intake."""

    def greeted(self) -> bool:
        """Whether its sender has greeted. It keeps what it has: after a goodbye on one lane the others' last
        words still come, and nobody is to be blamed for them."""
        self._greeted = self._greeted or self._ear.terms.greeted(self.peer)
        return self._greeted

    def _limit(self, message: Message) -> int:
        return self._ear.terms.bodies.get(type(message), 0) if self.greeted() else 0

    def count(self) -> None:
        """What it holds may have changed, as it does not with messages that come whole: whoever holds too
        much now is cut."""
        held = self.frames.held_bytes + self.waiting_bytes
        if held != self._held:
            self._held = held
            self._intake.holds(self._number, held, self._ear.terms.longest)

    def cut(self, reason: str) -> None:
        """What it holds is freed at once; whoever reads it finds the error."""
        self.error = Backlog(reason)
        self.end()
        self._cut()

    def end(self) -> None:
        """Nothing more is taken."""
        self.frames.close()
        self._intake.forget(self._number)


class Intake:
    """All that is sent to one transport."""

    def __init__(self) -> None:
        self.unfinished = Unfinished()
        self.checks = Checks()
        self.closed = False
        self._inflows: dict[int, Inflow] = {}
        self._numbers = itertools.count()

    def open(self, peer: PeerId, ear: Ear, cut: Callable[[], None]) -> Inflow:
        """For one stream of a peer; `cut` ends the stream."""
        number = next(self._numbers)
        inflow = self._inflows[number] = Inflow(self, number, peer, ear, cut)
        return inflow

    def holds(self, number: int, held: int, longest: int) -> None:
        """A stream holds so many bytes now."""
        inflow = self._inflows.get(number)
        if inflow is None:
            return
        for stream in self.unfinished.hold(inflow.peer, number, held, longest):
            cut = self._inflows.get(stream)
            if cut is not None:
                cut.cut(f"{self.unfinished.of(cut.peer)} bytes of its messages are unfinished")

    def forget(self, number: int) -> None:
        """A stream has ended."""
        inflow = self._inflows.pop(number, None)
        if inflow is not None:
            self.unfinished.hold(inflow.peer, number, 0, 0)
