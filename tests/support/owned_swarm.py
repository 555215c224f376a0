"""A swarm in memory whose owner gives orders."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from swarm import OWNER, Swarm, tiny_manifest

from protocols.messages.table import OrderUpdate
from protocols.signed.identity import Identity
from protocols.signed.orders import SignedOrder, seal_order
from swarmnet.run import owner_orders
from swarmnet.run.owner_orders import NO_ORDER, OwnerOrders


class Silent:
    """A visitor that only sends."""

    def received(self, *_): ...

    def lost(self, *_): ...

    def refused(self, *_): ...


class OwnedSwarm(Swarm):
    """With an owner who orders, from a machine that is no peer of the run."""

    def __init__(self, manifest, **options):
        super().__init__(manifest, **options)
        self.order: OwnerOrders = NO_ORDER

    def sealed(self, order: OwnerOrders) -> SignedOrder:
        sequence = owner_orders.next_sequence(self.order, self.loop.time())
        return seal_order(OWNER, self.signed.run_id, replace(order, sequence=sequence))

    async def give(self, order: OwnerOrders, to: str) -> SignedOrder:
        """One peer hears it, and says it on."""
        signed = self.sealed(order)
        self.order = signed.order
        await self.send(signed.data, to)
        return signed

    async def send(self, data: bytes, to: str, sender: Identity = OWNER) -> None:
        transport = self.network.transports.get(sender.peer_id) or self.network.transport(sender.peer_id)
        transport.listen(Silent())
        link = await transport.open(self.members[to].peer, "group", 5.0)
        link.post(OrderUpdate(data))
        await link.drained(0, 5.0)

    def sequences(self):
        return {self.members[name].worker.orders.book.order.sequence for name in self.living()}

    def knows(self, order: SignedOrder):
        return self.sequences() == {order.order.sequence}

    async def end_of(self, member):
        """Raises what it ended with."""
        async with asyncio.timeout(30.0):
            await member.task

    async def training(self):
        await self.until(lambda: self.committed(0) > 10 and self.committed(1) > 10, 60.0)


FOUR = (("a", 0), ("b", 0), ("c", 1), ("d", 1))


SIX = (("a", 0), ("b", 0), ("c", 0), ("d", 1), ("e", 1), ("f", 1))


def six(seed=3, stub=False, **settings):
    swarm = OwnedSwarm(tiny_manifest((2, 1)), seed=seed, stub=stub)
    swarm.open()
    for name, stage in SIX:
        swarm.start(name, stage, **settings)
    return swarm


def settled(swarm, *names):
    rounds = swarm.rounds()
    return min(rounds.get(name, (0, -1))[1] for name in names or swarm.living())
