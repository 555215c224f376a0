"""Two p2pd on 127.0.0.1, the one of which sends."""

from __future__ import annotations

import contextlib
import time

from protocols.daemon.p2pd import LOOPBACK
from protocols.p2pd.transport import P2pdTransport
from protocols.signed.identity import create


class Heard:
    """A receiver that notes what comes and when."""

    def __init__(self):
        self.messages = []

    def received(self, peer, lane, message, body, wire_bytes):
        self.messages.append((time.monotonic(), message, len(body)))

    def lost(self, peer, lane, reason):
        self.messages.append((time.monotonic(), reason, 0))

    def refused(self, peer, code, reason):
        raise AssertionError(reason)


@contextlib.asynccontextmanager
async def two_peers(folder):
    for name in ("a", "b"):
        create(folder / name)
    sender, taker = [await P2pdTransport.start(folder / name, LOOPBACK) for name in ("a", "b")]
    heard = Heard()
    sender.listen(Heard())
    taker.listen(heard)
    try:
        yield sender, taker, heard
    finally:
        await sender.close()
        await taker.close()
