"""A learning rate that is changed while a swarm trains: the same bits everywhere, whoever hears when."""

from __future__ import annotations

import pytest
from clocks import on_virtual_clock
from owned_swarm import SIX, settled, six
from swarm import shared_rounds

from peers.lab.world.virtual_time import run
from swarmnet.run import owner_orders
from swarmnet.run.owner_orders import NO_ORDER
from swarmnet.run.rates import WHOLE


def weights(swarm, stage):
    """Round -> the digest of the settled weights, which is the same on all."""
    return {round: digest for found in swarm.digests(stage).values() for round, digest in found.items()}


def factors(swarm, name):
    """The factors that the peer's open rounds have."""
    return {
        state.factor for state in swarm.members[name].worker.services.round_service.rounds.rounds.values()
    }


async def ordered(factor):
    """Six peers, of which one is away when the order of `factor` from round 12 on is given."""
    swarm = six()
    await swarm.until(lambda: settled(swarm) >= 3, 60.0)
    await swarm.leave("f")
    await swarm.give(owner_orders.rate(NO_ORDER, factor, 12, "the loss stands still"), "a")
    await swarm.until(lambda: settled(swarm) >= 16, 120.0)
    return swarm


def both_weights(swarm):
    """What both stages weigh, by round."""
    assert shared_rounds(swarm) > 20
    return [weights(swarm, stage) for stage in (0, 1)]


async def halved():
    """The one that was away comes back later, and another comes."""
    swarm = await ordered(WHOLE // 2)
    away = swarm.members["f"].worker.context.transport
    await away.close()
    swarm.start("f", 1)
    swarm.start("g", 0)
    await swarm.until(lambda: {"f", "g"} <= swarm.rounds().keys() and settled(swarm) >= 22, 120.0)
    assert set(swarm.living()) == {"a", "b", "c", "d", "e", "f", "g"}
    assert not swarm.of("resync")
    await swarm.close()
    assert shared_rounds(swarm) > 30
    return both_weights(swarm)


async def not_halved():
    """As far as it takes to compare."""
    swarm = await ordered(WHOLE)
    await swarm.close()
    return both_weights(swarm)


def test_a_halved_rate_is_the_same_bits_on_all_and_others_than_without_it():
    for with_order, without in zip(run(halved()), run(not_halved()), strict=True):
        assert all(with_order[round] == without[round] for round in range(12))
        assert with_order[12] != without[12]


@on_virtual_clock
async def test_who_hears_of_it_too_late_settles_nothing_else_and_goes_on_when_it_hears():
    swarm = six(stub=True)
    await swarm.until(lambda: settled(swarm) >= 3, 60.0)
    deaf = swarm.members["c"].worker.orders.book
    hears, deaf.take = deaf.take, lambda data: True
    await swarm.give(owner_orders.rate(NO_ORDER, 500, 8, ""), "a")
    await swarm.until(lambda: settled(swarm, "a", "b") >= 14, 60.0)
    assert settled(swarm, "c") == 7
    deaf.take = hears
    await swarm.give(owner_orders.pause(swarm.order, "anything"), "c")
    await swarm.give(owner_orders.resume(swarm.order, "anything"), "c")
    await swarm.until(lambda: settled(swarm) >= 20, 60.0)
    assert factors(swarm, "c") <= {500}
    await swarm.close()
    assert shared_rounds(swarm) > 20


@on_virtual_clock
async def test_who_went_on_alone_with_the_old_rate_takes_up_the_history_of_the_others():
    swarm = six(stub=True)
    await swarm.until(lambda: settled(swarm) >= 3, 60.0)
    everybody = {member.peer for member in swarm.members.values()}
    alone = {swarm.members[name].peer for name in ("c", "f")}
    swarm.network.partition(alone, everybody - alone)
    # Both know by then that they are alone; before, they settle what the others settle.
    await swarm.until(lambda: len(swarm.of("unlinked", "c", "f")) == 2 * len(everybody - alone), 60.0)
    at = settled(swarm)
    await swarm.give(owner_orders.rate(NO_ORDER, 500, at + 1, ""), "a")
    await swarm.until(lambda: settled(swarm) >= at + 6, 120.0)
    assert 500 not in factors(swarm, "c")
    swarm.network.heal()
    await swarm.until(lambda: {note.name for note in swarm.of("fetched", "c", "f")} == {"c", "f"}, 120.0)
    until = settled(swarm, "a") + 12
    await swarm.until(lambda: settled(swarm) >= until, 120.0)
    assert factors(swarm, "c") <= {500}
    await swarm.close()
    assert shared_rounds(swarm) > 20


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 6))])
@on_virtual_clock
async def test_an_order_for_rounds_that_are_past_parts_nobody(seed):
    """Some have settled a round with the old rate, and others not yet: nobody knows when it comes to whom."""
    swarm = six(seed, stub=True)
    await swarm.until(lambda: settled(swarm) >= 4, 60.0)
    for number in range(8):
        await swarm.during(swarm.network.random.uniform(0.3, 1.5))
        to = swarm.network.random.choice(SIX)[0]
        await swarm.give(owner_orders.rate(swarm.order, 100 + number, 0, ""), to)
    late = swarm.start("g", 0)
    until = settled(swarm, "a") + 8
    await swarm.until(lambda: late.worker.has_weights() and settled(swarm) >= until, 120.0)
    assert all(factors(swarm, name) <= {107} for name in swarm.living())
    await swarm.close()
    assert shared_rounds(swarm) > 20
