"""What a running peer learns of its own reachability: whom it asks, whom it believes, how often."""

import asyncio
from itertools import pairwise
from random import Random

import pytest
from on_p2pd import transports

from peers.lab.world.virtual_time import run as run_virtual
from peers.network.addresses import Addresses
from peers.network.reachability_probe import (
    AGAIN_SECONDS,
    HELPERS,
    RETRY_SECONDS,
    ReachabilityProbe,
    has_a_network,
    order_helpers,
    reached_an_announced,
)
from protocols.errors import PeerGone
from protocols.reachability.dial_back import DialBackResult, ask_dial_back
from protocols.reachability.fresh_dial import DialOutcome, can_dial
from protocols.signed.identity import load

SEEN, HERE = "/ip4/8.8.4.4/tcp/40000", "/ip4/8.8.4.4/tcp/31331"
SLOT = "/ip4/9.9.9.9/tcp/1/p2p/12D3KooWrelay/p2p-circuit"


class Peer:
    """One that asks. `says`: what the helpers answer, by name; the rest are gone."""

    def __init__(self, says, connected=None, told=(HERE,)):
        self.says, self.told = says, told
        self.connected = connected or [(name, "/ip4/1.1.1.1/tcp/1") for name in says]
        self.asked, self.ways = [], []
        self.reachable = ReachabilityProbe(
            asks=self.ask,
            connections=self.connections,
            addresses=lambda: Addresses(tuple(self.told), False, (31331,)),
            tell=lambda way: self.ways.append((way, asyncio.get_running_loop().time())),
            chance=Random(1),
        )

    async def connections(self, seconds):
        if self.connected == "gone":
            raise PeerGone("p2pd is about to be started again")
        return self.connected

    async def ask(self, helper, addresses):
        self.asked.append((helper, asyncio.get_running_loop().time()))
        said = self.says.get(helper, "gone")
        if said == "gone":
            raise PeerGone("it has no such service")
        if said in ("busy", "unable"):
            return DialBackResult(SEEN, said, ())
        return DialBackResult(
            SEEN, "done", tuple(DialOutcome(each, said, "", 0.1) for each in addresses(SEEN))
        )

    async def during(self, seconds):
        work = asyncio.create_task(self.reachable.run())
        await asyncio.sleep(seconds)
        assert not work.done()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    def after(self, seconds):
        """The ways that were told within so long."""
        run_virtual(self.during(seconds))
        return [way for way, _ in self.ways]


def test_a_peer_that_somebody_gets_in_to_is_reachable_and_asks_again_after_half_an_hour():
    peer = Peer({"a": "reached", "b": "reached"})
    assert peer.after(100) == ["direct"]
    assert len(peer.asked) == 1
    peer = Peer({"a": "reached"})
    assert peer.after(3 * AGAIN_SECONDS) == ["direct"]
    times = [at for _, at in peer.asked]
    pauses = [later - earlier for earlier, later in pairwise(times)]
    assert all(0.5 * AGAIN_SECONDS <= pause <= 1.5 * AGAIN_SECONDS for pause in pauses)
    assert 2 <= len(times) <= 6


def test_one_who_does_not_get_in_is_not_believed_while_another_does():
    peer = Peer({"a": "silent", "b": "silent", "c": "silent", "d": "reached"})
    peer.connected = [("a", "/ip4/1.1.1.1/tcp/1"), ("d", "/ip4/10.0.0.1/tcp/1")]
    assert peer.after(100) == ["direct"]
    assert [helper for helper, _ in peer.asked] == ["a", "d"]


@pytest.mark.parametrize(("told", "way"), [((HERE,), "none"), ((HERE, SLOT), "relayed")])
def test_where_two_do_not_get_in_a_relay_makes_the_difference(told, way):
    peer = Peer({"a": "refused", "b": "silent", "c": "reached"}, told=told)
    peer.connected = [
        (name, f"/ip4/{host}/tcp/1")
        for name, host in zip("abc", ("1.1.1.1", "1.1.1.2", "10.0.0.1"), strict=True)
    ]
    assert peer.after(100) == [way]
    assert {helper for helper, _ in peer.asked} == {"a", "b"}


def test_a_slot_that_is_lost_is_seen_without_another_question():
    async def story():
        work = asyncio.create_task(peer.during(300.0))
        await asyncio.sleep(150.0)
        peer.told = (HERE,)
        await work

    peer = Peer({"a": "silent", "b": "silent"}, told=(HERE, SLOT))
    run_virtual(story())
    assert [way for way, _ in peer.ways] == ["relayed", "none"]
    assert 150.0 <= peer.ways[1][1] <= 161.0
    assert len(peer.asked) == 2


@pytest.mark.parametrize("said", ["busy", "unable", "gone", "failed", "not_tried"])
def test_where_nobody_can_tell_nothing_is_said_and_it_asks_again_sooner_but_never_everybody(said):
    peer = Peer({f"peer {number}": said for number in range(20)})
    assert peer.after(100) == []
    assert len(peer.asked) == len({helper for helper, _ in peer.asked}) == HELPERS
    peer.after(2 * RETRY_SECONDS)
    assert len(peer.asked) > 2 * HELPERS


@pytest.mark.parametrize(
    ("announced", "found"), [("/ip4/9.9.9.9/tcp/1", None), ("/ip4/10.0.0.1/tcp/1", False)]
)
def test_a_shut_door_proves_nothing_while_a_public_address_was_not_tried(announced, found):
    dialled = (DialOutcome(HERE, "silent", "", 0.1), DialOutcome(announced, "not_tried", "", 0.0))
    assert reached_an_announced(Addresses((announced,), False, (31331,)), dialled) is found


def test_without_a_p2pd_that_answers_nobody_is_asked():
    peer = Peer({}, connected="gone")
    assert peer.after(500) == []
    assert peer.asked == []


def test_who_stands_in_the_open_internet_is_asked_first_and_who_is_behind_a_relay_last():
    connections = [
        ("circuit", SLOT),
        ("home", "/ip4/192.168.1.7/tcp/1"),
        ("open", "/ip4/8.8.8.8/tcp/1"),
        ("both", SLOT),
        ("both", "/ip6/2606:4700::1111/tcp/1"),
    ]
    for seed in range(20):
        found = order_helpers(connections, Random(seed))
        assert set(found[:2]) == {"open", "both"}
        assert found[2:] == ["home", "circuit"]


def test_only_an_address_that_others_are_told_counts():
    told = Addresses(("/ip4/192.168.1.5/tcp/31331",), False, (31331,))
    door = told.doors(SEEN)[0]
    own = DialOutcome(told.announced[0], "not_tried", "", 0.0)
    assert reached_an_announced(told, [own, DialOutcome(door, "silent", "", 0.0)]) is False
    assert reached_an_announced(told, [own, DialOutcome(door, "reached", "", 0.0)]) is False
    assert reached_an_announced(told, [own]) is None
    assert reached_an_announced(told, []) is None
    assert reached_an_announced(told, [DialOutcome(told.announced[0], "reached", "", 0.0)]) is True


def test_a_peer_that_listens_to_its_own_machine_only_asks_nobody():
    assert not has_a_network(["/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/1"])
    assert has_a_network(["/ip4/127.0.0.1/tcp/1", "/ip4/10.0.0.1/tcp/1"])


@pytest.mark.loopback
@pytest.mark.skipif(not can_dial(), reason="py-libp2p (the extra libp2p) is not installed")
async def test_real_peers_dial_back_and_find_an_open_door_open_and_a_shut_one_shut(tmp_path):
    async with transports(tmp_path) as start:
        asker, helper, other = await start(), await start(), await start()
        identity, told = load(tmp_path / "identity0"), list(asker.addresses)

        async def ask(peer, addresses):
            return await ask_dial_back(asker.daemon, peer, identity, addresses)

        addresses = lambda: Addresses(tuple(told), True, ())  # noqa: E731
        reachable = ReachabilityProbe(
            asks=ask,
            connections=asker.daemon.connections,
            addresses=addresses,
            tell=lambda way: None,
            chance=Random(1),
        )
        assert await reachable.ask() is None, "nobody is connected"
        for each in (helper, other):
            await asker.daemon.connect(each.peer, each.addresses, 20.0)
        assert await reachable.ask() is True
        told[:] = ["/ip4/127.0.0.1/tcp/1"]
        assert await reachable.ask() is False
        told.clear()
        assert await reachable.ask() is None, "there is nothing to dial"
