"""Transports on real p2pd processes, which leave nothing running behind them."""

import asyncio
from contextlib import asynccontextmanager

from test_transport_contract import Listener

from protocols.daemon import LOOPBACK
from protocols.identity import create
from protocols.p2pd import P2pdTransport


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
