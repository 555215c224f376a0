"""Transports on real p2pd processes, which leave nothing running behind them."""

import asyncio
from contextlib import asynccontextmanager

from protocols.daemon.p2pd import LOOPBACK
from protocols.p2pd.transport import P2pdTransport
from protocols.signed.identity import create


@asynccontextmanager
async def transports(folder):
    """What starts one more, with an identity in `folder` and a listener of its own."""
    running = []

    async def start(options=LOOPBACK, **more):
        path = folder / f"identity{len(running)}"
        create(path)
        transport = await P2pdTransport.start(path, options, **more)
        transport.listener = Listener()
        transport.listen(transport.listener)
        running.append(transport)
        return transport

    yield start
    for transport in running:
        await transport.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


DEADLINE = 60.0


class Listener:
    """A Receiver that remembers, and lets a test wait for what must happen."""

    def __init__(self):
        self.received_, self.lost_, self.refused_ = [], [], []
        self.judge = lambda peer, message, body: None
        self._changed = asyncio.Event()

    def received(self, peer, lane, message, body, wire_bytes):
        self.judge(peer, message, body)
        self.received_.append((peer, lane, message, bytes(body), wire_bytes))
        self._changed.set()

    def lost(self, peer, lane, reason):
        self.lost_.append((peer, lane, reason))
        self._changed.set()

    def refused(self, peer, code, reason):
        self.refused_.append((peer, code, reason))
        self._changed.set()

    @property
    def messages(self):
        return [message for _, _, message, _, _ in self.received_]

    async def until(self, holds):
        async with asyncio.timeout(DEADLINE):
            while not holds(self):
                self._changed.clear()
                await self._changed.wait()
