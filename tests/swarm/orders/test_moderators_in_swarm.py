"""Bans by moderators in a swarm: all peers obey, also those that come later; one signature bans nobody."""

from __future__ import annotations

import pytest
from clocks import on_virtual_clock
from owned_swarm import SIX, OwnedSwarm
from swarm import tiny_manifest

from peers.config.errors import UserError
from protocols.signed.identity import Identity
from protocols.signed.moderation import add_signature, begin_moderation
from swarmnet.run.owner_orders import Ban, OwnerOrders
from swarmnet.run.schema import Moderators

KEYS = [Identity.from_seed(bytes([number]) * 32) for number in (21, 22, 23)]
MODERATORS = Moderators(tuple(key.peer_id for key in KEYS), 2)


def signed(swarm, banned, *signers, sequence=1):
    """The ban of one peer, or of nobody."""
    bans = (Ban(banned, "sent nonsense"),) if banned is not None else ()
    run = swarm.signed.run_id
    begun = begin_moderation(signers[0], run, MODERATORS, OwnerOrders(sequence, "noise", bans=bans))
    for signer in signers[1:]:
        begun = add_signature(signer, run, begun)
    return begun.data


def banned_by(swarm):
    orders = [swarm.members[name].worker.orders.book.order for name in swarm.living()]
    return {tuple((ban.peer, ban.by) for ban in order.bans) for order in orders}


@on_virtual_clock
async def test_a_ban_by_two_moderators_reaches_all_and_who_comes_later_and_one_signature_bans_nobody():
    swarm = OwnedSwarm(tiny_manifest((2, 1), moderators=MODERATORS), seed=3)
    swarm.open()
    for name, stage in SIX:
        swarm.start(name, stage)
    await swarm.training()
    liar = swarm.members["e"]
    await swarm.send(signed(swarm, liar.peer, KEYS[0]), "a", KEYS[0])
    await swarm.during(5.0)
    assert banned_by(swarm) == {()}
    assert liar.worker.services is not None
    refusals = [note.fields["code"] for note in swarm.of("refused", "a")]
    assert "bad_signature" in refusals

    await swarm.send(signed(swarm, liar.peer, *KEYS[:2]), "a", KEYS[1])
    with pytest.raises(UserError, match="the run's moderators have banned this peer: sent nonsense"):
        await swarm.end_of(liar)
    liar.dead = True
    await swarm.until(lambda: banned_by(swarm) == {((liar.peer, "moderators"),)}, 30.0)
    swarm.start("late", 1)
    await swarm.until(lambda: "late" in swarm.rounds(), 60.0)
    ban = f"{liar.peer} is banned by moderators: sent nonsense"
    assert ("order", f"new order: {ban} (noise)") in swarm.members["a"].said
    notices = [line for member in swarm.members.values() for topic, line in member.said if topic == "order"]
    assert not [notice for notice in notices if "owner" in notice], "each names who gave it"
    assert banned_by(swarm) == {((liar.peer, "moderators"),)}, "also the newcomer knows"

    await liar.worker.context.transport.close()
    back = swarm.start("e", 1)
    with pytest.raises(UserError, match="moderators have banned"):
        await swarm.end_of(back)
    back.dead = True
    await swarm.send(signed(swarm, None, KEYS[0], KEYS[2], sequence=2), "b", KEYS[2])
    await swarm.until(lambda: banned_by(swarm) == {()}, 30.0)
    await swarm.close()
