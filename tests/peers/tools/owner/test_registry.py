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
from protocols.messages.table import PeerRecord
from protocols.signed.identity import Identity
from protocols.signed.opinions import OpinionDocument, seal_opinion
from protocols.signed.orders import seal_order
from protocols.signed.records import seal_record
from protocols.signed.registry_entry import seal_listing
from swarmnet.run.owner_orders import OwnerOrders


def member(network: MemoryNetwork, name: str):
    identity = Identity.from_seed(name.encode())
    network.transport(identity.peer_id)
    return network.directory(identity.peer_id)


def book(signed) -> OrderBook:
    return OrderBook(signed=signed, kept=None, log_event=lambda *_, **__: None, notify=lambda *_: None)


def active_record(signed, stage, name="peer", settled=3, state="training", role="worker", tokens=700):
    """A record of a peer that has its stage's weights."""
    peer = Identity.from_seed(name.encode())
    record = PeerRecord(
        peer.peer_id, stage, role, ["/ip4/127.0.0.1/tcp/1"], max(settled, 0), 1.0, "0.1.0",
        state=state, settled=settled, finalized_tokens=tokens,
    )  # fmt: skip
    now = asyncio.get_running_loop().time()
    return stage, seal_record(peer, signed.run_id, record, now)


async def listed_run(directory, name, order=None, records=(), **keys):
    """A run in the registry, with its owner's order and its peers' records."""
    signed = sign(tiny_manifest(name=name, **{"listed": True, **keys}))
    await directory.put_manifest(signed.run_id, signed.wire(), 1.0)
    if order is not None:
        await directory.put_order(signed.run_id, seal_order(OWNER, signed.run_id, order).data, 1.0)
    for stage, record in records(signed) if records else ():
        await directory.announce(signed.run_id, stage, record, 1.0)
    await keep(book(signed), directory, lambda *_, **__: None)
    return signed


@on_virtual_clock
async def test_listed_runs_are_found_and_each_proves_itself():
    network = MemoryNetwork()
    one, reader = member(network, "one"), member(network, "reader")
    for name in ("b", "a"):
        await listed_run(one, name)
    private = await listed_run(one, "private", listed=False)
    await keep(book(sign(tiny_manifest(name="lost", listed=True))), one, lambda *_, **__: None)
    entry = seal_listing(private.run_id, OWNER.peer_id, private.signature)
    await one.put_listing(entry, 1.0)  # Somebody lists a run that does not want it.
    found, entries = await runs(reader, 50, Random(1))
    assert [run.signed.manifest.name for run in found] == ["a", "b"]  # Nobody has the manifest of "lost".
    assert entries == 4
    few, _ = await runs(reader, 1, Random(1))
    assert len(few) <= 1


@on_virtual_clock
async def test_the_state_is_what_the_owner_signed_and_else_what_peers_report():
    network = MemoryNetwork()
    one, reader = member(network, "one"), member(network, "reader")

    def stages(settled=3, count=2, state="training"):
        def records(signed):
            return [active_record(signed, n, f"{n}", settled, state) for n in range(count)]

        return records

    def remembered(settled):
        return lambda signed: [active_record(signed, -1, "boot", settled, "serving", "bootstrap")]

    paused, ends = OwnerOrders(sequence=7, paused=True), OwnerOrders(sequence=8, ends=3)
    cases = {
        "proposed": [(paused, stages(-1)), (paused, ())],
        "paused": [(paused, stages(3, state="paused_by_owner")), (paused, remembered(5))],
        "training": [(None, stages()), (OwnerOrders(sequence=8, ends=9), stages(3))],
        "idle": [(None, ()), (None, stages(count=1)), (None, stages(state="joining")), (None, remembered(5))],
        "ended": [(ends, stages(3, state="ended")), (ends, ()), (ends, remembered(3))],
    }
    for state, each in cases.items():
        for number, (order, records) in enumerate(each):
            await listed_run(one, f"{state} {number}", order, records, stages=(2, 1))
    found, _ = await runs(reader, 50, Random(1))
    assert {run.signed.manifest.name: run.state for run in found} == {
        f"{state} {number}": state for state, each in cases.items() for number in range(len(each))
    }
    training = next(run for run in found if run.signed.manifest.name == "training 0")
    assert training.facts.active_peers == (1, 1)
    assert training.facts.tokens == 700


@on_virtual_clock
async def test_only_endorsements_by_trusted_curators_count_among_many_runs():
    network = MemoryNetwork()
    one, reader = member(network, "one"), member(network, "reader")
    anna, ben, stranger = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2, 3))
    await asyncio.sleep(1000.0)  # The clock starts at zero, and no opinion is signed before it.
    listed = [await listed_run(one, f"run {number}") for number in range(6)]

    async def endorse(identity, signed, age=0.0, withdrawn=False):
        document, now = OpinionDocument("", "good", withdrawn), asyncio.get_running_loop().time()
        await one.put_opinion(seal_opinion(identity, signed.run_id, document, now - age), 1.0)

    await endorse(anna, listed[1], age=9.0)
    await endorse(ben, listed[1])
    await endorse(ben, listed[2], age=9.0)
    await endorse(ben, listed[2], withdrawn=True)
    await endorse(ben, listed[2], age=9.0)  # A replay brings nothing back.
    await endorse(anna, listed[3])
    for signed in listed:
        await endorse(stranger, signed)

    async def endorsed(*trusted):
        found, _ = await runs(reader, 50, Random(1), {each.peer_id for each in trusted}, endorsed=True)
        return {run.signed.manifest.name: [opinion.author for opinion in run.endorsements] for run in found}

    assert await endorsed(anna, ben) == {
        "run 1": [ben.peer_id, anna.peer_id],
        "run 3": [anna.peer_id],
    }
    assert await endorsed(ben) == {"run 1": [ben.peer_id]}
    assert await endorsed() == {}
    few, _ = await runs(reader, 1, Random(1), {ben.peer_id}, endorsed=True)
    assert [run.signed.manifest.name for run in few] == ["run 1"]  # Not lost among those of strangers.


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
