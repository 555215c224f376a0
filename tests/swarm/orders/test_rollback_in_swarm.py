"""A roll-back: one peer's contributions leave the open rounds, and all peers keep the same bits."""

from __future__ import annotations

import pytest
from clocks import on_virtual_clock
from owned_swarm import SIX, OwnedSwarm, settled, six
from swarm import sharded_manifest, tiny_manifest

from swarmnet.rounds.result_table import tag_of
from swarmnet.run import owner_orders
from swarmnet.run.owner_orders import NO_ORDER


def members_of(swarm, name):
    """Round -> the peers whose contributions are in the open round's set, at this peer."""
    rounds = swarm.members[name].worker.services.round_service.rounds
    return {number: set(state.held) for number, state in rounds.rounds.items()}


def ignores_orders(swarm, name):
    """A peer that goes on contributing, whatever the owner orders. Returns its id."""
    book = swarm.members[name].worker.orders.book
    book.take, book.accept = lambda data: True, lambda order: False
    return swarm.members[name].peer


def are_together(swarm, names):
    """Whether each of these peers shares the branch of all others of its stage."""
    members = [swarm.members[name] for name in names]
    return all(
        {other.peer for other in members if other.worker.stage == one.worker.stage} - {one.peer}
        <= one.worker.services.round_service.rounds.same_branch_peers.keys()
        for one in members
    )


def shared_by(swarm, names):
    """How many rounds several of these peers settled; AssertionError where their digests differ."""
    shared = 0
    for stage in (0, 1):
        by_round = {}
        for name, digests in swarm.digests(stage).items():
            for number, digest in digests.items() if name in names else ():
                by_round.setdefault(number, []).append(digest)
        assert [number for number, found in by_round.items() if len(set(found)) > 1] == []
        shared += sum(len(found) > 1 for found in by_round.values())
    return shared


@on_virtual_clock
async def test_what_a_peer_contributed_leaves_the_open_rounds_of_all_and_settled_ones_stay():
    swarm = six(stub=True)
    await swarm.until(lambda: settled(swarm) >= 5, 60.0)
    liar = ignores_orders(swarm, "c")
    await swarm.until(lambda: any(liar in held for held in members_of(swarm, "a").values()), 10.0)
    before = settled(swarm, "a")
    await swarm.give(owner_orders.roll_back(NO_ORDER, liar, "it sends noise"), "a")
    assert not any(liar in held for held in members_of(swarm, "a").values())
    await swarm.until(lambda: settled(swarm, "a", "b", "d") >= before + 12, 60.0)
    assert not any(liar in held for held in members_of(swarm, "b").values())
    await swarm.close()
    assert shared_by(swarm, "abdef") > 20


@pytest.mark.parametrize(
    "seed", [0, 12, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (*range(1, 12), *range(13, 40)))]
)
@on_virtual_clock
async def test_a_roll_back_that_reaches_peers_at_any_time_parts_nobody(seed):
    """Some have settled rounds with the contributions and others not yet; links break and newcomers come."""
    swarm = OwnedSwarm(tiny_manifest((2, 1)), seed=seed, stub=True)
    swarm.open()
    names = [*SIX, ("g", 0), ("h", 0)]
    for name, stage in names:
        swarm.start(name, stage)
    chance = swarm.network.random
    await swarm.until(lambda: settled(swarm) >= 4, 60.0)
    gone = {ignores_orders(swarm, name) for name in "cf"}
    everybody = {member.peer for member in swarm.members.values()}
    for victim in ("c", "f"):
        await swarm.during(chance.uniform(0.1, 2.0))
        if chance.random() < 0.5:
            away = {swarm.members[name].peer for name in chance.sample(["b", "g", "h", "e"], 2)}
            swarm.network.partition(away, everybody - away)
        order = owner_orders.roll_back(swarm.order, swarm.members[victim].peer, "noise")
        await swarm.give(order, chance.choice(["a", "b", "d", "g"]))
        await swarm.during(chance.uniform(0.0, 8.0))
        swarm.network.heal()
    late = swarm.start("late", 0)
    left = ["a", "b", "d", "e", "g", "h", "late"]
    await swarm.until(lambda: late.worker.has_weights() and are_together(swarm, left), 240.0)
    until = max(settled(swarm, name) for name in left) + 8
    await swarm.until(lambda: settled(swarm, *left) >= until and are_together(swarm, left), 240.0)
    for name in left:
        assert not any(gone & held for held in members_of(swarm, name).values())
    await swarm.close()
    assert shared_by(swarm, left) > 20


@on_virtual_clock
async def test_with_reducers_summed_rounds_stand_and_later_sums_leave_the_peer_out():
    swarm = OwnedSwarm(sharded_manifest((1,), shards=8, global_batch_tokens=512), seed=2, stub=True)
    swarm.open()
    for name in "abcde":
        swarm.start(name, 0, in_flight=1)
    await swarm.until(lambda: len(swarm.rounds()) == 5 and settled(swarm) >= 8, 90.0)
    liar = ignores_orders(swarm, "c")
    offers = swarm.members["a"].worker.services.round_service.rounds.offers

    def named(round):
        """Whether the settled sums of a round name the liar; None if the round is not known."""
        references = offers.known(round).get(round)
        return None if references is None else tag_of(liar) in offers.contributors(references)

    await swarm.until(lambda: any(liar in held for held in members_of(swarm, "a").values()), 30.0)
    closed = swarm.rounds()["a"][0]
    await swarm.give(owner_orders.roll_back(NO_ORDER, liar, "it sends noise"), "a")
    assert not any(liar in held for held in members_of(swarm, "a").values())
    await swarm.until(lambda: settled(swarm, *"abde") >= closed + 8, 120.0)
    later = range(closed + 2, settled(swarm, "a"))
    assert {named(round) for round in later} == {False}
    assert any(named(round) for round in range(closed - 6, closed)), "what was summed stands"
    await swarm.close()
    by_round = {}
    for name, digests in swarm.digests(0).items():
        for round, digest in digests.items() if name in "abde" else ():
            by_round.setdefault(round, set()).add(digest)
    assert all(len(found) == 1 for found in by_round.values())
