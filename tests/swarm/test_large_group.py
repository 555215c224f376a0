"""A group that is too large for everybody to be linked to everybody: the workers themselves, in memory."""

from __future__ import annotations

import statistics

import pytest
from clocks import on_virtual_clock
from hypothesis import given, settings
from hypothesis import strategies as st
from swarm import Swarm, shared_rounds, tiny_manifest

from peers.lab.bench.group import measure
from protocols.memory.conditions import Conditions
from swarmnet.identifiers import PeerId
from swarmnet.membership.overlay import FULL_GROUP, RINGS, choose_neighbours, choose_some, hops, links
from swarmnet.run.schema import Rounds

PEERS = 16


def distances(me: PeerId, linked: dict[PeerId, frozenset[PeerId]]) -> dict[PeerId, int]:
    found, front = {me: 0}, [me]
    while front:
        near = {other for peer in front for other in linked[peer]} - found.keys()
        found.update(dict.fromkeys(near, max(found.values()) + 1))
        front = sorted(near)
    return found


@settings(max_examples=40)
@given(st.integers(2, 200), st.integers(0, 1000))
def test_neighbours_are_few_mutual_and_near_everybody(count, seed):
    group = [PeerId(f"{seed}/{number}") for number in range(count)]
    linked = {peer: choose_neighbours(peer, group) for peer in group}
    for peer, others in linked.items():
        assert peer not in others
        assert len(others) <= max(links(count), 1)
        assert all(peer in linked[other] for other in others)
    if count <= FULL_GROUP:
        assert all(len(others) == count - 1 for others in linked.values())
    for peer in group[:5]:
        away = distances(peer, linked)
        assert len(away) == count
        assert max(away.values()) <= hops(count)


def test_a_peer_that_leaves_changes_only_its_neighbours_links():
    group = [PeerId(f"peer {number}") for number in range(100)]
    linked = {peer: choose_neighbours(peer, group) for peer in group}
    after = {peer: choose_neighbours(peer, group[1:]) for peer in group[1:]}
    changed = {peer for peer in group[1:] if after[peer] != linked[peer]}
    assert changed <= linked[group[0]]


def test_of_a_large_stage_every_peer_draws_others():
    stage = [PeerId(f"peer {number}") for number in range(100)]
    drawn = [choose_some(PeerId(f"me {number}"), stage, 8) for number in range(50)]
    assert all(len(some) == 8 for some in drawn)
    assert len(frozenset.union(*drawn)) > 90
    assert choose_some(PeerId("me"), stage[:5], 8) == frozenset(stage[:5])


def test_contributions_reach_everybody_within_hops_and_cost_little_more_than_themselves():
    small, large = (measure(peers, 24_000, 21.0, seed=1) for peers in (8, 32))
    for row in (small, large):
        assert row.rounds >= 2, "and all sets are equal, or measure() would have raised"
        assert row.twice == 0
        assert row.sent_ratio < 1.1
        assert row.most_sent_ratio < 1.5
    assert large.everywhere_p999 < small.everywhere_p999 * hops(32)
    assert large.corrections < 0.01


def settled_by_all(swarm: Swarm) -> int:
    return min(settled for _, settled in swarm.rounds().values())


@on_virtual_clock
async def test_sixteen_peers_with_ten_links_each_settle_one_history_through_deaths_and_a_newcomer():
    rules = Rounds(
        global_batch_tokens=PEERS * 128,
        max_seconds=5.0,
        contribution_timeout_seconds=1.0,
        finality_timeout_seconds=3.0,
        snapshot_interval=4,
    )
    swarm = Swarm(tiny_manifest((3,), rounds=rules), conditions=Conditions(latency_seconds=0.02), stub=True)
    swarm.open()
    for number in range(PEERS):
        swarm.start(f"p{number}", 0, compute=lambda _: 0.1)
    await swarm.until(lambda: len(swarm.rounds()) == PEERS and settled_by_all(swarm) >= 2, 120.0)
    await swarm.during(12.0)
    linked = [
        sum(known.linked for known in member.worker.services.links.membership.peers.values())
        for member in swarm.members.values()
    ]
    assert max(linked) <= 2 * RINGS, "links that nobody needs any more are released"
    assert min(linked) >= RINGS
    for victim in ("p3", "p11"):
        await swarm.crash(victim)
    await swarm.during(5.0)
    swarm.start("newcomer", 0, compute=lambda _: 0.1)
    at = max(settled for _, settled in swarm.rounds().values())
    await swarm.until(lambda: "newcomer" in swarm.rounds() and settled_by_all(swarm) > at + 4, 120.0)
    await swarm.close()
    assert shared_rounds(swarm) > 10
    assert not swarm.of("resync")
    contributors = [note.fields["contributors"] for note in swarm.of("applied", "p0")]
    assert statistics.median(contributors) >= PEERS - 4, "a round holds what the whole group made"


@pytest.mark.parametrize("fault", ["", "kills", "lies"])
def test_with_helpers_a_line_sends_little_more_than_its_contribution(fault: str):
    helped = measure(
        16, 300_000, 30.0, seed=1, shards=16, helpers=2, kills=fault == "kills", lies=fault == "lies"
    )
    assert helped.rounds >= 1, "and all sets are equal, or measure() would have raised"
    assert helped.line_mean < (1.7 if fault else 1.1)
    assert helped.line_most < (4.0 if fault else 1.3)
    assert helped.counted > (0.4 if fault else 0.999)
    assert bool(helped.killed) == bool(fault)
