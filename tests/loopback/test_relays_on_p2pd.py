"""Circuits through real p2pd: what goes through one, whose relay it is, and what happens when that goes."""

import asyncio
from dataclasses import replace

import pytest
from on_p2pd import DEADLINE, Listener

from protocols.daemon.hivemind_imports import PeerID
from protocols.daemon.multiaddr import through_relay
from protocols.daemon.p2pd import LOOPBACK
from protocols.dht.directory import DhtDirectory
from protocols.messages.table import Act, Busy
from protocols.p2pd.transport import P2pdTransport
from protocols.reachability.circuit_relay import PING_PROTOCOL
from protocols.signed.identity import create

pytestmark = pytest.mark.loopback
BODY = 3_000_000
"""More than p2pd's own relay may carry, which is 128 KiB."""

NOWHERE = "/ip4/127.0.0.1/tcp/1"


@pytest.fixture
async def trio(tmp_path):
    """A relay, a peer that has a slot there, and one that knows of it by its circuit alone."""
    peers = []
    for name in ("relay", "hidden", "asker"):
        create(tmp_path / name)
        # What the two tell of themselves leads nowhere: p2pd dials directly by itself where it can.
        announce = () if name == "relay" else (NOWHERE,)
        options = replace(LOOPBACK, relay=True, carries=name == "relay", announce=announce)
        peer = await P2pdTransport.start(tmp_path / name, options)
        peer.listener = Listener()
        peer.listen(peer.listener)
        peers.append(peer)
    relay, hidden, _ = peers
    said = asyncio.Queue()
    hidden.relays._tasks.append(
        asyncio.create_task(
            hidden.relays._keep_slot(relay.peer, relay.addresses, lambda *told, **_: said.put_nowait(told))
        )
    )
    assert await hidden.relays.first(DEADLINE)
    assert hidden.addresses == (*hidden.daemon.addresses, *hidden.relays.addresses)
    hidden.said, hidden.ways = said, hidden.relays.addresses
    yield peers
    for peer in peers:
        await peer.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_messages_go_both_ways_through_a_bootstraps_circuit_and_are_counted_there(trio):
    relay, hidden, asker = trio
    link = await asker.open(hidden.peer, "data", DEADLINE, hidden.relays.addresses)
    link.post(Act("x", 1, 1, 1, 1.0, (1, 2, 3)), bytes(BODY))
    await hidden.listener.until(lambda heard: heard.messages)
    back = await hidden.open(asker.peer, "data", DEADLINE)
    back.post(Busy("x", 3, 1))
    await asker.listener.until(lambda heard: heard.messages)
    assert BODY < relay.circuits.carried_bytes < 2 * BODY
    assert (relay.circuits.circuits, relay.circuits.slots) == (1, 1)
    assert not link.addresses, "no carriers through a relay"


async def test_p2pd_says_of_a_stream_whether_it_goes_through_a_relay(trio):
    relay, hidden, asker = trio
    await asker.daemon.connect(hidden.peer, hidden.relays.addresses, DEADLINE)
    for peer, relayed in ((hidden, True), (relay, False)):
        stream = await asker.daemon.stream(peer.peer, PING_PROTOCOL, DEADLINE)
        assert through_relay(stream.address) == relayed
        stream.writer.close()


async def test_a_connection_that_is_given_up_ends_at_both_sides(trio):
    _, hidden, asker = trio
    link = await asker.open(hidden.peer, "data", DEADLINE, hidden.relays.addresses)
    link.post(Busy("x", 3, 1))
    await hidden.listener.until(lambda heard: heard.messages)
    await asker.daemon.disconnect(hidden.peer, DEADLINE)
    await asker.listener.until(lambda heard: heard.lost_)
    await hidden.listener.until(lambda heard: heard.lost_)


@pytest.mark.parametrize("slotted", [True, False])
async def test_nodes_of_the_directory_reach_each_other_by_their_ids_where_both_have_slots(trio, slotted):
    _, hidden, asker = trio
    nodes = [await DhtDirectory.start(hidden.daemon)]
    ways = hidden.relays.addresses if slotted else ()
    nodes.append(await DhtDirectory.start(asker.daemon, ways=ways))
    try:
        answer = await nodes[1]._node.protocol.call_ping(PeerID.from_base58(hidden.peer))
        assert (answer is not None) == slotted
    finally:
        for node in nodes:
            await node.close()


async def test_when_the_relay_dies_links_end_at_once_and_the_slot_is_no_longer_announced(trio):
    relay, hidden, asker = trio
    link = await asker.open(hidden.peer, "data", DEADLINE, hidden.relays.addresses)
    link.post(Busy("x", 3, 1))
    await hidden.listener.until(lambda heard: heard.messages)
    await relay.close()
    await asker.listener.until(lambda heard: heard.lost_)
    await hidden.listener.until(lambda heard: heard.lost_)
    async with asyncio.timeout(DEADLINE):
        _, through, ways = await hidden.said.get()
        assert (through, ways) == (relay.peer, hidden.ways)
        assert (await hidden.said.get())[1:] == (relay.peer, ()), "nobody reaches it that way now"
    assert hidden.addresses == hidden.daemon.addresses
