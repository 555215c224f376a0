"""A paused worker: announced in the directory as `paused`, with no stage in memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from peers.config.run_file import SignedManifest
from peers.network.channels import DIAL_SECONDS
from peers.network.discovery.claims import Claims, plain_name
from peers.network.message_router import MessageRouter, handles
from peers.process.role import Network, Process
from peers.telemetry.console import StatusLine
from protocols.errors import WireError
from protocols.fields import Body
from protocols.messages.table import Bye, GetManifest, Hello, Lane, ManifestResponse, Message
from protocols.messages.terms import Terms
from protocols.ports import Transport, find_no_text
from protocols.signed.envelope import run_bytes
from protocols.signed.peer_record import NO_STAGE
from swarmnet.identifiers import PeerId
from swarmnet.run.schema import WIRE_VERSION

MAX_ANSWERS = 8
"""Peers answered at the same time; a peer that gets no answer tries another one."""


class PausedReceiver:
    """`Receiver` of the transport while the peer is paused. It answers handshakes with `Bye("pausing")` and
    sends the run's manifest on request. It ignores all other messages."""

    def __init__(self, transport: Transport, signed: SignedManifest, record: Callable[[], bytes]) -> None:
        self.transport = transport
        self.signed = signed
        self.record = record
        self._router = MessageRouter()
        self._router.add(self)
        self._answers: dict[tuple[PeerId, type[Message]], asyncio.Task[None]] = {}

    def received(self, peer: PeerId, lane: Lane, message: Message, body: bytes, wire_bytes: int) -> None:
        self._router.dispatch(peer, message, body)

    @handles(GetManifest)
    def _on_get_manifest(self, peer: PeerId, _message: GetManifest, _body: bytes) -> None:
        self._answer(peer, [(ManifestResponse(), self.signed.wire())])

    @handles(Hello)
    def _on_hello(self, peer: PeerId, _message: Hello, _body: bytes) -> None:
        hello = Hello(WIRE_VERSION, run_bytes(self.signed.run_id), self.record())
        self._answer(peer, [(hello, b""), (Bye("pausing"), b"")])

    def lost(self, peer: PeerId, lane: Lane, reason: str) -> None:
        """Ignore a lost link: a paused peer waits for no one."""

    def refused(self, peer: PeerId, code: str, reason: str) -> None:
        """Ignore a malformed message: a paused peer acts on none."""

    def _answer(self, peer: PeerId, messages: list[tuple[Message, Body]]) -> None:
        key = (peer, type(messages[0][0]))
        if key in self._answers or len(self._answers) >= MAX_ANSWERS:
            return
        task = asyncio.create_task(self._send(peer, messages), name=f"doorkeeper {peer}")
        self._answers[key] = task
        task.add_done_callback(lambda _: self._answers.pop(key, None))

    async def _send(self, peer: PeerId, messages: list[tuple[Message, Body]]) -> None:
        with contextlib.suppress(WireError):
            link = await self.transport.open(peer, "group", DIAL_SECONDS)
            for message, body in messages:
                link.post(message, body)
            await link.drained(0, DIAL_SECONDS)
            link.close()

    async def close(self) -> None:
        for task in list(self._answers.values()):
            task.cancel()
        await asyncio.gather(*self._answers.values(), return_exceptions=True)


async def rest(process: Process, signed: SignedManifest, network: Network, told: str) -> None:
    """Stay announced as paused, without a stage, until cancelled. `told` is the status line."""
    presence = network.announcer(process, signed)
    claims = Claims("paused", name=plain_name(process.config.name))

    def record() -> bytes:
        return presence.record(NO_STAGE, claims)

    door = PausedReceiver(network.transport, signed, record)
    network.transport.listen(door, Terms({}, lambda peer: False))
    network.transport.serve_chunks(lambda digest, index: None)
    network.transport.serve_text(find_no_text)
    process.report.status(StatusLine(told))
    try:
        await presence.announce_forever(NO_STAGE, record)
    finally:
        await door.close()
