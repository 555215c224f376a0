"""Reads a stream that another peer has opened, to its end or to where its sender goes too far.

A message is handed on a turn of the event loop, so that whatever comes in one read the others have their
turns; and nothing is read while the sender has had more signatures checked than it may
(swarmnet/resources/allowances.py): then flow control holds it back, and nothing that it sent is lost.
"""

from __future__ import annotations

import asyncio

from protocols.daemon.p2pd import DAEMON_ERRORS
from protocols.errors import Backlog, Malformed, WireError
from protocols.framing.intake import Intake
from protocols.framing.send_queue import Ear
from protocols.messages.table import Lane
from protocols.p2pd.multipath_link import ACKNOWLEDGED, acknowledgement
from protocols.signed.identity import CHECKED, Checked
from swarmnet.identifiers import PeerId
from swarmnet.resources.allowances import PACE_BYTES, PACE_SECONDS, Pace

FIRST_MESSAGE_SECONDS = 10.0
"""For a stream's first message, and for a greeting of who opened it."""
IDLE_SECONDS = 60.0
"""Three keep-alives missed: the other process is frozen, or the path is dead and libp2p has not noticed."""
UNREAD_BYTES = 64 * 1024
"""Of acknowledgements that the other side does not read: no honest peer lets 16,000 of them lie."""
LOOK_SECONDS = 0.5
"""How often a stream that is not read, for its sender has had its checks, is looked at."""
HELD_BACK_SECONDS = 5.0
"""In all, of one stream: 250 signatures beyond the 1,024 at once, which the busiest honest peer does not need
(tests/swarmnet/resources/test_allowances.py computes it). Who wants more is no peer."""
CLOSED = "closed by the other side"
_READ_BYTES = 256 * 1024

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Reading:
    """One stream, while it is read."""

    def __init__(
        self, intake: Intake, ear: Ear, peer: PeerId, lane: Lane, stream: Stream, introduced: bool = False
    ) -> None:
        """`introduced`: it has been said whose it is; otherwise a first message and a greeting must come."""
        self.intake, self.ear, self.peer, self.lane = intake, ear, peer, lane
        self.reader, self.writer = stream
        self.inflow = intake.open(peer, ear, self.writer.transport.abort)
        self.clock = asyncio.get_running_loop().time
        self.first_until = float("inf") if introduced else self.clock() + FIRST_MESSAGE_SECONDS
        self.idle_until = self.clock() + IDLE_SECONDS
        self.pace = Pace()
        self.held_back_seconds = 0.0

    async def read(self) -> tuple[WireError | None, str]:
        """Read it to its end: the error to refuse the peer for, or why the stream ended."""
        try:
            reason = await self._run()
        except WireError as error:
            return self.inflow.error or error, ""
        except DAEMON_ERRORS as broken:
            # Whoever closes reads no more: an acknowledgement then finds nobody there, and with that error
            # asyncio drops what had come and was not read yet, the sender's last word among it.
            if self.inflow.frames.closed or isinstance(broken, BrokenPipeError):
                return self.inflow.error, CLOSED
            return self.inflow.error, f"the stream broke ({broken or type(broken).__name__})"
        finally:
            self.inflow.end()
        return self.inflow.error, reason

    async def _run(self) -> str:
        """Why the stream ended. Raises WireError if its sender is to be refused."""
        frames, told = self.inflow.frames, 0
        while True:
            until = min(self.idle_until, self.pace.until, self.first_until)
            if self.clock() >= until:  # It writes without a pause, but not what it should.
                return self._too_late(until)
            try:
                async with asyncio.timeout_at(until):
                    data = await self.reader.read(_READ_BYTES)
            except TimeoutError:
                return self._too_late(until)
            if not data or self.inflow.error is not None:
                break
            self.idle_until = self.clock() + IDLE_SECONDS
            if self.ear.receiver is None:
                self.inflow.end()
                self.pace, self.first_until = Pace(), float("inf")
                continue
            before = frames.body_bytes
            await self._deliver(data)
            self.pace.came(frames.body_bytes - before, not frames.finished, self.clock())
            if frames.messages and self.inflow.greeted():
                self.first_until = float("inf")
            if self.lane in ACKNOWLEDGED and frames.messages != told:
                told = frames.messages
                self.writer.write(acknowledgement(told))
                if self.writer.transport.get_write_buffer_size() > UNREAD_BYTES:
                    raise Malformed("it does not read what is acknowledged")
        if frames.closed:
            return CLOSED
        return "it ended" if frames.finished else "it ended in the middle of a message"

    def _too_late(self, until: float) -> str:
        if until == self.first_until:
            what = "greeting" if self.inflow.frames.messages else "message"
            raise Malformed(f"no {what} within {FIRST_MESSAGE_SECONDS:g} s of opening a link")
        if until == self.pace.until:
            raise Backlog(f"less than {PACE_BYTES} bytes of an unfinished message in {PACE_SECONDS:g} s")
        return f"silent for {IDLE_SECONDS:g} s"

    async def _deliver(self, data: bytes) -> None:
        """Hand on what `data` completes, a message a turn of the loop. Raises WireError."""
        for message, body, taken in self.inflow.frames.take(data):
            await self._afford(len(data))
            if self.ear.receiver is None or self.inflow.error is not None:
                return
            checked = Checked()
            token = CHECKED.set(checked)
            try:
                self.ear.receiver.received(self.peer, self.lane, message, body, taken)
            finally:
                CHECKED.reset(token)
                self.intake.checks.spend(self.peer, checked.count, self.clock())
            await asyncio.sleep(0)
        self.inflow.count()
        if self.inflow.error is not None:
            raise self.inflow.error

    async def _afford(self, waiting_bytes: int) -> None:
        """Wait until the peer may have signatures checked again. What was read counts as unfinished. Raises
        Backlog if that takes too long in all."""
        checks, inflow = self.intake.checks, self.inflow
        while not self.intake.closed and (wait := checks.wait(self.peer, self.clock())) > 0:
            inflow.waiting_bytes = waiting_bytes
            inflow.count()
            if inflow.error is not None:
                return
            if self.held_back_seconds >= HELD_BACK_SECONDS:
                raise Backlog("it has sent more signatures than an honest peer has")
            self.held_back_seconds += min(wait, LOOK_SECONDS)
            await asyncio.sleep(min(wait, LOOK_SECONDS))
            self.pace.paused(self.clock())
            self.idle_until = self.clock() + IDLE_SECONDS
        inflow.waiting_bytes = 0
