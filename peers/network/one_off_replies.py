"""Send single responses to peers that are not neighbours, and close the link after each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from peers.telemetry import log_events
from protocols.errors import WireError
from protocols.fields import Body
from protocols.messages.table import Message
from protocols.ports import Transport
from swarmnet.identifiers import PeerId


@dataclass(eq=False, kw_only=True)
class OneOffReplies:
    """Sends one response of a kind per peer at a time. A flood thus costs the requester more than us. `sent`
    counts bytes on the wire by message kind."""

    transport: Transport
    sent: Counter[str]
    log_event: log_events.LogEvent
    deadline_seconds: float

    def __post_init__(self) -> None:
        self._under_way: set[tuple[PeerId, type[Message]]] = set()

    async def answer(self, peer: PeerId, message: Message, body: Body = b"") -> None:
        """Open a link to the peer, send the message and close the link. Does nothing while a response of this
        type is being sent to this peer. A failure is only logged."""
        reply = (peer, type(message))
        if reply in self._under_way:
            return
        self._under_way.add(reply)
        try:
            link = await self.transport.open(peer, "group", self.deadline_seconds)
            self.sent[message.kind] += link.post(message, body)
            await link.drained(0, self.deadline_seconds)
            link.close()
        except WireError as error:
            self.log_event(log_events.AnswerFailed(peer=peer, code=error.code, reason=str(error)))
        finally:
            self._under_way.discard(reply)
