"""Read a stream that another peer opened, until it ends or its sender violates a limit.

One message is delivered per turn of the event loop, so one large read does not starve other streams. Nothing
is read while the sender has used up its budget of signature checks (swarmnet/resources/allowances.py). Flow
control then holds the sender back without losing data. The pace is the minimum rate at which an unfinished
message must arrive. A sender that violates a limit is refused: the caller gets a `WireError` to report.
"""

from __future__ import annotations

import asyncio
from dataclasses import InitVar, dataclass

from protocols.daemon.p2pd import DAEMON_ERRORS
from protocols.errors import Backlog, Malformed, WireError
from protocols.framing.intake import Intake
from protocols.framing.send_queue import ReceiverSlot
from protocols.messages.table import Lane
from protocols.p2pd.multipath_link import ACKNOWLEDGED, acknowledgement
from protocols.signed.identity import CHECKED, Checked
from swarmnet.identifiers import PeerId
from swarmnet.resources.allowances import PACE_BYTES, PACE_SECONDS, Pace

FIRST_MESSAGE_SECONDS = 10.0
"""Timeout in seconds for a stream's first message, and for `Hello` of the peer that opened it."""
IDLE_SECONDS = 60.0
"""Three missed keep-alives: the other process is frozen, or libp2p has not noticed a dead path."""
UNREAD_BYTES = 64 * 1024
"""Maximum bytes of acknowledgements that the other side has not read: 16,000 of them."""
LOOK_SECONDS = 0.5
"""Interval in seconds for checking a stream that is paused because its sender has used up its budget."""
HELD_BACK_SECONDS = 5.0
"""Maximum total pause of one stream in seconds. It amounts to 250 signatures beyond the 1,024 of a burst,
which the busiest honest peer does not need (computed in tests/swarmnet/resources/test_allowances.py)."""
CLOSED = "closed by the other side"
_READ_BYTES = 256 * 1024

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(eq=False, kw_only=True)
class StreamReader:
    """Reads one stream and delivers its messages to the receiver in `slot`, which is empty once the receiver
    was replaced. `inflow` parses messages and counts the bytes that are not delivered. Prepare to read.
    `introduced` is True if the sender is already known. Otherwise a message and `Hello` must come within
    `FIRST_MESSAGE_SECONDS`."""

    intake: Intake
    slot: ReceiverSlot
    peer: PeerId
    lane: Lane
    stream: InitVar[Stream]
    introduced: InitVar[bool] = False

    def __post_init__(self, stream: Stream, introduced: bool) -> None:
        self.reader, self.writer = stream
        self.inflow = self.intake.open(self.peer, self.slot, self.writer.transport.abort)
        self.clock = asyncio.get_running_loop().time
        self.first_message_until = float("inf") if introduced else self.clock() + FIRST_MESSAGE_SECONDS
        self.idle_until = self.clock() + IDLE_SECONDS
        self.pace = Pace()
        self.held_back_seconds = 0.0

    async def read(self) -> tuple[WireError | None, str]:
        """Read to the end, and return (error, reason). The error says which limit the sender violated; None
        if there was no violation. The reason says why the stream ended; it is empty after some errors."""
        try:
            reason = await self._run()
        except WireError as error:
            return self.inflow.error or error, ""
        except DAEMON_ERRORS as broken:
            # A peer that closes reads no more, so writing an acknowledgement to it fails. asyncio then drops
            # data that had arrived but was not read yet, such as the sender's last message.
            if self.inflow.frames.closed or isinstance(broken, BrokenPipeError):
                return self.inflow.error, CLOSED
            return self.inflow.error, f"the stream broke ({broken or type(broken).__name__})"
        finally:
            self.inflow.end()
        return self.inflow.error, reason

    async def _run(self) -> str:
        """Read until the stream ends or is silent too long, and return why. Messages are delivered and, on
        some lanes, acknowledged. Raises WireError if the sender violates a limit."""
        frames = self.inflow.frames
        acknowledged = 0
        while True:
            until = min(self.idle_until, self.pace.until, self.first_message_until)
            if self.clock() >= until:  # The sender writes all the time, but not what it should.
                return self._handle_timeout(until)
            try:
                async with asyncio.timeout_at(until):
                    data = await self.reader.read(_READ_BYTES)
            except TimeoutError:
                return self._handle_timeout(until)
            if not data or self.inflow.error is not None:  # The caller reports the error.
                break
            self.idle_until = self.clock() + IDLE_SECONDS
            if self.slot.receiver is None:  # No receiver any more: read without limits, and drop all.
                self.inflow.end()
                self.pace = Pace()
                self.first_message_until = float("inf")
                continue
            body_bytes_before = frames.body_bytes
            await self._deliver(data)
            new_body_bytes = frames.body_bytes - body_bytes_before
            self.pace.came(new_body_bytes, unfinished=not frames.finished, now=self.clock())
            if frames.messages and self.inflow.greeted():  # `Hello` has come.
                self.first_message_until = float("inf")
            if self.lane in ACKNOWLEDGED and frames.messages != acknowledged:
                acknowledged = frames.messages
                self.writer.write(acknowledgement(acknowledged))
                if self.writer.transport.get_write_buffer_size() > UNREAD_BYTES:
                    raise Malformed("it does not read what is acknowledged")
        if frames.closed:
            return CLOSED
        return "it ended" if frames.finished else "it ended in the middle of a message"

    def _handle_timeout(self, until: float) -> str:
        """Handle that the time `until` has passed. Returns the reason of the end if the stream was silent.
        Raises Malformed if the first message is missing, Backlog if a message arrives too slowly."""
        if until == self.first_message_until:
            what = "greeting" if self.inflow.frames.messages else "message"
            raise Malformed(f"no {what} within {FIRST_MESSAGE_SECONDS:g} s of opening a link")
        if until == self.pace.until:
            raise Backlog(f"less than {PACE_BYTES} bytes of an unfinished message in {PACE_SECONDS:g} s")
        return f"silent for {IDLE_SECONDS:g} s"

    async def _deliver(self, data: bytes) -> None:
        """Deliver the messages that `data` completes, one per turn of the loop. Stops if there is no receiver
        any more. Raises WireError if the sender violates a limit."""
        for message, body, wire_bytes in self.inflow.frames.take(data):
            await self._wait_for_budget(len(data))
            if self.slot.receiver is None or self.inflow.error is not None:
                return
            checked = Checked()
            token = CHECKED.set(checked)  # Signature checks are counted in this context variable.
            try:
                self.slot.receiver.received(self.peer, self.lane, message, body, wire_bytes)
            finally:
                CHECKED.reset(token)
                self.intake.checks.spend(self.peer, checked.count, self.clock())
            await asyncio.sleep(0)
        self.inflow.count()  # It sets `error` if the sender's unfinished messages take too much memory.
        if self.inflow.error is not None:
            raise self.inflow.error

    async def _wait_for_budget(self, waiting_bytes: int) -> None:
        """Wait until the peer's budget allows more signature checks. The `waiting_bytes` already read count
        as undelivered; if there are too many, `inflow.error` is set and the wait ends. Raises Backlog if the
        stream has waited `HELD_BACK_SECONDS` in total."""
        checks, inflow = self.intake.checks, self.inflow
        while not self.intake.closed:
            wait = checks.wait(self.peer, self.clock())
            if wait <= 0:
                break
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
