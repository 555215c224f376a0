"""What a stranger's record makes a peer dial: few addresses, none behind its router, and friends first."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
from clocks import on_virtual_clock
from hypothesis import given
from hypothesis import strategies as st
from swarm import Swarm, tiny_manifest

from protocols.messages.table import PeerRecord
from protocols.signed.identity import Identity
from protocols.signed.records import seal_record
from swarmnet.identifiers import PeerId
from swarmnet.membership.address_ranges import dialable, range_of
from swarmnet.membership.dial_budget import ADDRESSES_PER_MINUTE, BURST_ADDRESSES, RANGE_FAILURES, DialBudget
from swarmnet.membership.membership import MAX_ADJACENT, Membership

PUBLIC, HOME, LAB = "/ip4/203.0.114.5/tcp/1", "/ip4/192.168.1.5/tcp/1", "/ip4/127.0.0.1/tcp/1"
CIRCUIT = "/p2p/12D3KooW/p2p-circuit"


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("/ip4/203.0.114.5/tcp/1", "203.0.114.0/24"), ("/ip4/203.0.114.9/udp/4/quic-v1", "203.0.114.0/24"),
        (PUBLIC + CIRCUIT, "203.0.114.0/24"), ("/ip6/2a01:4f8:1:2::3/tcp/1", "2a01:4f8:1::/48"),
        ("/ip6/::ffff:203.0.114.5/tcp/1", "203.0.114.0/24"), ("/dns4/203.0.114.5/tcp/1", "203.0.114.0/24"),
        ("/ip6/64:ff9b::cb00:7205/tcp/1", "203.0.114.0/24"), ("/dns4/example.org/tcp/1", "dns4/example.org"),
        ("/memory/a", "memory/a"), ("/ip4/300.1.1.1/tcp/1", "ip4/300.1.1.1"), ("", "/"),
    ],
)  # fmt: skip
def test_the_range_of_an_address_is_its_network_or_its_name(address, network):
    assert range_of(address) == network


@pytest.mark.parametrize(
    ("address", "from_outside", "at_home", "in_a_lab"),
    [
        (PUBLIC, True, True, True), (PUBLIC + CIRCUIT, True, True, True),
        ("/ip6/2a01:4f8::1/tcp/1", True, True, True), ("/dns4/example.org/tcp/1", True, True, True),
        (HOME, False, True, False), ("/ip4/192.168.7.7/tcp/1", False, True, False),
        ("/ip4/10.0.0.1/tcp/1", False, False, False), (HOME + CIRCUIT, False, True, False),
        (LAB, False, False, True), ("/ip6/::1/tcp/1", False, False, True),
        ("/ip6/::ffff:127.0.0.1/tcp/1", False, False, True), ("/dns4/localhost/tcp/1", False, False, False),
        ("/dns4/x.localhost./tcp/1", False, False, False), ("/ip4/169.254.1.1/tcp/80", False, False, False),
        ("/ip6/fe80::1/tcp/1", False, False, False), ("/ip4/224.0.0.1/udp/1", False, False, False),
        ("/dns4/127.0.0.1/tcp/1", False, False, True), ("/dns4/127.1/tcp/1", False, False, True),
        ("/dns/2130706433/tcp/1", False, False, True), ("/dns4/0x7f.0.0.1/tcp/1", False, False, True),
        ("/dns4/0177.1/tcp/1", False, False, True), ("/dns6/::1/tcp/1", False, False, True),
        ("/dns4/192.168.1.7./tcp/1", False, True, False), ("/dns4/169.254.1.1/tcp/80", False, False, False),
        ("/ip6/64:ff9b::7f00:1/tcp/1", False, False, True),
        ("/ip6/2002:c0a8:107::1/tcp/1", False, True, False),
        ("/ip6/::127.0.0.1/tcp/1", False, False, True), ("/ip6/fec0::1/tcp/1", False, False, False),
        ("/ip6/64:ff9b:1::1/tcp/1", False, False, False),
        ("/ip6/2a01:4f8::5efe:a00:1/tcp/1", False, False, False),
        ("/ip6zone/lo/ip6/fe80::1/tcp/1", False, False, False), ("/dnsaddr/example.org", False, False, False),
        ("/ip6/64:ff9b::808:808/tcp/1", True, True, True), ("/dns4/8.8.8.8/tcp/1", True, True, True),
        ("/ip4/0.0.0.0/tcp/1", False, False, False), ("/ip4/240.1.1.1/tcp/1", False, False, False),
        ("/ip4/255.255.255.255/udp/1", False, False, False), ("/ip4/1/tcp/1", False, False, False),
    ],
)  # fmt: skip
def test_only_who_has_an_address_in_a_private_network_is_led_there(address, from_outside, at_home, in_a_lab):
    assert bool(dialable([address], [PUBLIC])) is from_outside
    assert bool(dialable([address], [PUBLIC, HOME, LAB])) is at_home
    assert bool(dialable([address], [LAB, "/ip6/::1/tcp/1"])) is in_a_lab


def test_peers_of_one_machine_reach_each_other_at_an_address_of_any_kind():
    there = "/ip4/192.0.2.2/tcp/1"  # Of a test network: neither public nor private.
    assert dialable([there], ["/ip4/127.0.0.1/tcp/2", "/ip4/192.0.2.2/tcp/2"]) == (there,)
    assert dialable([there], ["/ip4/192.0.2.3/tcp/2"]) == ()


@given(st.lists(st.text(max_size=30)), st.lists(st.text(max_size=30)))
def test_any_text_for_an_address_is_taken_or_left_without_an_error(addresses, own):
    assert set(dialable(addresses, own)) <= set(addresses)


def test_failed_dials_of_strangers_are_ten_addresses_a_minute_after_the_first_burst():
    budget, tried = DialBudget(), 0
    for second in range(600):
        for number in range(100):
            peer = PeerId(f"{second} {number}")
            if budget.take(peer, [f"/ip4/1.{second % 256}.{number}.1/tcp/1", f"/dns/{peer}/tcp/1"], second):
                tried += 2
                budget.failed(peer, second)
    assert BURST_ADDRESSES <= tried <= BURST_ADDRESSES + 10 * ADDRESSES_PER_MINUTE


def test_whoever_is_there_costs_nothing():
    budget = DialBudget()
    for number in range(10 * BURST_ADDRESSES):
        assert budget.take(PeerId(str(number)), [f"/dns/{number}/tcp/1"], 0.0)
        budget.reached(PeerId(str(number)))


def test_a_network_where_nobody_is_is_left_alone_longer_and_longer_until_somebody_is():
    budget, tried = DialBudget(), []
    for second in range(3600):
        if budget.take(PeerId("gone"), ["/ip4/203.0.114.5/tcp/1"], second):
            tried.append(second)
            budget.failed(PeerId("gone"), second)
    assert tried[:RANGE_FAILURES] == list(range(RANGE_FAILURES))
    pauses = [later - earlier for earlier, later in pairwise(tried[RANGE_FAILURES - 1 :])]
    assert pauses == [10, 20, 40, 80, 160, 320, 600, 600, 600, 600]
    assert budget.take(PeerId("elsewhere"), ["/ip4/203.0.115.5/tcp/1"], 3600)
    assert budget.take(PeerId("there"), ["/ip4/203.0.114.6/tcp/1"], 4000)
    budget.reached(PeerId("there"))
    assert budget.take(PeerId("gone"), ["/ip4/203.0.114.5/tcp/1"], 4001)


def meet(membership: Membership, name: str, teller: PeerId | None = None) -> PeerId:
    peer = PeerId(name)
    membership.recorded(peer, 1, "worker", (f"/dns/{name}/tcp/1",), 1, b"record", 0.0, teller)
    return peer


def test_friends_come_first_and_cost_nothing():
    membership = Membership(me=PeerId("me"), stage=1, chance=Random(1))
    first = meet(membership, "first")
    assert membership.begin_dials(0.0) == [first]
    membership.linked(first, 0.0)
    for number in range(1000):
        meet(membership, f"nobody {number}")
    told = {meet(membership, f"told {number}", first) for number in range(3)}
    met, greets = meet(membership, "met"), meet(membership, "greets")
    membership.keeps_us(greets, True)
    membership.met([met, PeerId("unknown")])
    left = membership.budget._left
    begun = membership.begin_dials(1.0)
    assert set(begun[:2]) == {met, greets}
    assert set(begun[2:5]) == told
    assert membership.budget._left == left - len(begun) + 2


def test_of_the_records_of_nobody_few_are_dialled():
    membership = Membership(me=PeerId("me"), stage=0, chance=Random(1))
    for number in range(768):
        meet(membership, f"nobody {number}")
    dialled = 0
    for second in range(110):
        for peer in membership.begin_dials(float(second)):
            dialled += 1
            membership.unlinked(peer, float(second))
            membership.dialing(peer, False)
    assert MAX_ADJACENT <= dialled <= BURST_ADDRESSES + 2 * ADDRESSES_PER_MINUTE


FALSE = [Identity.from_seed(b"nobody %d" % number) for number in range(300)]


def announce_nobody(swarm: Swarm) -> None:
    """Records of peers that do not exist, under the key of stage 1."""
    run_id = swarm.signed.run_id
    kept = swarm.network.records.setdefault((run_id, 1), {})
    for each in FALSE:
        record = PeerRecord(each.peer_id, 1, "worker", [f"/memory/{each.peer_id}"], 0, 0.0, "0")
        kept[each.peer_id] = seal_record(each, run_id, record, swarm.loop.time())


@on_virtual_clock
async def test_among_records_of_nobody_few_are_dialled_and_a_newcomer_finds_the_others():
    swarm = Swarm(tiny_manifest((1, 2)), stub=True)
    swarm.open()
    for name, stage in {"a": 0, "b": 0, "c": 1, "d": 1}.items():
        swarm.start(name, stage, compute=lambda _: 0.5)
    await swarm.until(lambda: swarm.committed(1) > 20, 60.0)
    announce_nobody(swarm)
    await swarm.during(45.0)
    for name in "abcd":
        assert len(swarm.of("dial_failed", name)) <= BURST_ADDRESSES + ADDRESSES_PER_MINUTE
    assert len(swarm.of("dial_failed", "a")) > 50, "they are tried"
    announce_nobody(swarm)
    swarm.start("e", 1)
    await swarm.until(lambda: swarm.of("linked", "e"), 30.0)
    await swarm.until(lambda: any(note.fields["contributor"] == swarm.members["e"].peer
                                  for note in swarm.of("contribution_accepted")), 30.0)  # fmt: skip
    await swarm.close()
