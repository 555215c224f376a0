"""The registry: listed runs are found with their manifests, the others are left out."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from clocks import on_virtual_clock
from swarm import OWNER, sign, tiny_manifest

from peers.config.errors import NoAnswer
from peers.network.discovery import visitor_session
from peers.network.discovery.bootstrap import PeerCache
from peers.network.orders.order_book import OrderBook
from peers.network.orders.republish import keep
from peers.tools.owner.registry import runs
from protocols.memory.transport import MemoryNetwork
from protocols.signed.identity import Identity
from protocols.signed.orders import seal_order
from protocols.signed.registry_entry import seal_listing
from swarmnet.run.owner_orders import OwnerOrders


def member(network: MemoryNetwork, name: str):
    identity = Identity.from_seed(name.encode())
    network.transport(identity.peer_id)
    return network.directory(identity.peer_id)


def book(signed) -> OrderBook:
    return OrderBook(signed=signed, kept=None, log_event=lambda *_, **__: None, notify=lambda *_: None)


@on_virtual_clock
async def test_listed_runs_are_found_and_each_proves_itself():
    network = MemoryNetwork()
    one, reader = member(network, "one"), member(network, "reader")
    listed = [sign(tiny_manifest(name=name, listed=True)) for name in ("b", "a")]
    private, lost = sign(tiny_manifest(name="private")), sign(tiny_manifest(name="lost", listed=True))
    for signed in (*listed, private):
        await one.put_manifest(signed.run_id, signed.wire(), 1.0)
        await keep(book(signed), one, lambda *_, **__: None)
    await keep(book(lost), one, lambda *_, **__: None)  # Nobody has its manifest.
    entry = seal_listing(private.run_id, OWNER.peer_id, private.signature)
    await one.put_listing(entry, 1.0)  # Somebody lists a run that does not want it.
    found, entries = await runs(reader, 50, Random(1))
    assert [signed.manifest.name for signed in found] == ["a", "b"]
    assert entries == 4
    few, _ = await runs(reader, 1, Random(1))
    assert len(few) <= 1


@on_virtual_clock
async def test_upkeep_takes_the_newer_order_and_hands_on_the_own():
    network = MemoryNetwork()
    one, two = member(network, "one"), member(network, "two")
    signed = sign(tiny_manifest())
    has, lacks = book(signed), book(signed)
    has.take(seal_order(OWNER, signed.run_id, OwnerOrders(sequence=7, paused=True)).data)
    for held, directory in ((lacks, two), (has, one), (lacks, two)):
        await keep(held, directory, lambda *_, **__: None)
    assert lacks.order.paused
    assert lacks.held == has.held


class Nobody:
    """A transport and a directory that are there, and lead to nobody."""

    daemon = None

    @classmethod
    async def start(cls, *_, **__):
        return cls()

    async def close(self):
        pass


@pytest.mark.parametrize(
    ("silent", "said"), [("join_directory", "no peer answered"), ("find_manifest", "the run was not found")]
)
async def test_where_nobody_answers_the_next_step_is_named(monkeypatch, tmp_path, silent, said):
    async def never(*_):
        await asyncio.Event().wait()

    async def at_once(*_):
        pass

    for name in ("join_directory", "find_manifest"):
        monkeypatch.setattr(visitor_session, name, never if name == silent else at_once)
    for name in ("P2pdTransport", "DhtDirectory"):
        monkeypatch.setattr(visitor_session, name, Nobody)
    monkeypatch.setattr(visitor_session, "FIND_SECONDS", 0.05)
    told = rf"{said} within 0.05 s; is the address right\? swarmnet doctor --run RUN --bootstrap ADDRESS"
    with pytest.raises(NoAnswer, match=told):
        async with visitor_session.visit_run(
            "ab" * 32, [], PeerCache(tmp_path / "peers.json"), lambda *_: None
        ):
            pass
