"""Orders in a whole swarm on the virtual clock: they reach everybody, are obeyed, and part no group."""

from __future__ import annotations

import pytest
from clocks import on_virtual_clock
from hostile import Liar
from owned_swarm import FOUR, OwnedSwarm, Silent
from swarm import OWNER, nothing_is_committed_twice, shared_rounds, tiny_manifest

from peers.config.errors import UserError
from protocols.messages.table import Hello
from protocols.signed.envelope import run_bytes
from protocols.signed.identity import Identity
from protocols.signed.invites import prove_invite, seal_invite
from protocols.signed.orders import seal_order
from protocols.signed.records import open_record
from swarmnet.run import owner_orders
from swarmnet.run.owner_orders import NO_ORDER, OwnerOrders
from swarmnet.run.schema import WIRE_VERSION

pytestmark = pytest.mark.swarm


def swarm_of(*names: tuple[str, int], **changes) -> OwnedSwarm:
    swarm = OwnedSwarm(tiny_manifest((2, 1), **changes), seed=3, stub=True)
    swarm.open()
    for name, stage in names:
        swarm.start(name, stage)
    return swarm


@on_virtual_clock
async def test_a_pause_reaches_everybody_and_ends_as_soon_as_the_owner_says():
    swarm = swarm_of(*FOUR)
    await swarm.training()
    paused = await swarm.give(owner_orders.pause(NO_ORDER, "a look at the data"), "c")
    await swarm.until(lambda: swarm.knows(paused), 2.0)
    await swarm.during(8.0)  # What was under way is done, and the open round closes.
    assert {member.worker.state for member in swarm.members.values()} == {"paused_by_owner"}
    before = swarm.committed(0), swarm.committed(1)
    late = swarm.start("e", 0)  # It takes the order with the first link.
    await swarm.until(lambda: late.worker.state == "paused_by_owner", 20.0)
    await swarm.during(5.0)
    assert (swarm.committed(0), swarm.committed(1)) == before
    resumed = await swarm.give(owner_orders.resume(paused.order, ""), "d")
    await swarm.until(lambda: swarm.knows(resumed), 2.0)
    await swarm.until(lambda: swarm.committed(0) > before[0] + 10, 20.0)
    assert late.worker.state == "training"
    await swarm.send(paused.data, "a")  # A replay of the older one.
    await swarm.during(3.0)
    assert swarm.knows(resumed)
    assert swarm.members["a"].worker.state == "training"
    await swarm.close()
    assert shared_rounds(swarm) > 3
    nothing_is_committed_twice(swarm)


@on_virtual_clock
async def test_forged_orders_are_refused_and_counted():
    swarm = swarm_of(*FOUR[1:3])
    await swarm.training()
    stranger = Identity.from_seed(b"stranger")
    forged = seal_order(stranger, swarm.signed.run_id, OwnerOrders(sequence=10**15, paused=True))
    damaged = bytearray(swarm.sealed(OwnerOrders(paused=True)).data)
    damaged[-1] ^= 1
    other_run = seal_order(OWNER, "12" * 32, OwnerOrders(sequence=10**15, paused=True)).data
    for data in (forged.data, bytes(damaged), other_run):
        await swarm.send(data, "b", stranger)
        await swarm.during(0.5)
    assert swarm.sequences() == {0}
    refused = swarm.members["b"].worker.services.links.traffic.refused
    assert refused["bad_signature"] == 2
    assert refused["wrong_run"] == 1
    await swarm.close()


@on_virtual_clock
async def test_a_banned_peer_is_left_alone_by_all_and_the_sets_stay_equal():
    swarm = swarm_of(*FOUR, ("e", 1))
    await swarm.training()
    banned = swarm.members["e"]
    order = owner_orders.ban(NO_ORDER, banned.peer, "sent nonsense")
    # Far from it, in the middle of rounds to which it has contributed.
    await swarm.give(order, "a")
    with pytest.raises(UserError, match="has banned this peer: sent nonsense"):
        await swarm.end_of(banned)
    banned.dead = True
    at = swarm.committed(1)
    await swarm.until(lambda: swarm.committed(1) > at + 20, 30.0)
    await banned.worker.context.transport.close()
    back = swarm.start("e", 1)  # It knows of the ban now.
    with pytest.raises(UserError, match="has banned"):
        await swarm.end_of(back)
    back.dead = True
    for name in swarm.living():
        assert banned.peer not in swarm.members[name].worker.services.links.membership.peers
    await swarm.close()
    assert shared_rounds(swarm) > 3


@on_virtual_clock
async def test_a_banned_peer_that_will_not_go_is_refused_by_everybody():
    swarm = swarm_of(*FOUR, ("e", 1))
    await swarm.training()
    rebel = swarm.members["e"]
    rebel.worker.orders.gatekeeper.check_self = lambda me: None
    rebel.worker.orders.gatekeeper.refusal = lambda peer, invite: None
    given = await swarm.give(owner_orders.ban(NO_ORDER, rebel.peer, ""), "d")
    await swarm.until(lambda: swarm.knows(given), 5.0)
    began = swarm.loop.time()
    await swarm.during(6.0)
    mine = {note.fields["id"] for note in swarm.of("contribution_made", "e") if note.time > began}
    for name in [name for name in swarm.living() if name != "e"]:
        assert rebel.peer not in swarm.members[name].worker.services.links.membership.peers
        assert not mine & {note.fields["id"] for note in swarm.of("contribution_accepted", name)}
    assert swarm.of("refused_by", "e")
    await swarm.crash("e")
    await swarm.close()
    nothing_is_committed_twice(swarm)


@on_virtual_clock
async def test_everybody_saves_when_a_checkpoint_is_asked_for(tmp_path):
    swarm = OwnedSwarm(tiny_manifest((2, 1)), stub=True)
    swarm.open()
    for name, stage in FOUR:
        swarm.start(name, stage, checkpoints=tmp_path / name, checkpoint_seconds=3600.0)
    await swarm.training()
    await swarm.until(lambda: min(settled for _, settled in swarm.rounds().values()) > 2, 30.0)
    assert not list(tmp_path.rglob("*.safetensors"))
    await swarm.give(owner_orders.checkpoint(NO_ORDER, "before the holidays"), "a")
    await swarm.until(lambda: len({p.parent for p in tmp_path.rglob("*.safetensors")}) == 4, 30.0)
    await swarm.close()


@on_virtual_clock
async def test_withdrawn_documents_are_read_no_more():
    swarm = swarm_of(*FOUR[1:3])
    read = []

    def without(withdrawn):
        read.append(withdrawn)
        return swarm.text

    swarm.text_without = without
    await swarm.training()
    await swarm.give(owner_orders.withdraw(NO_ORDER, "ab" * 32, "its author asked"), "c")
    await swarm.until(lambda: read == [frozenset({bytes.fromhex("ab" * 32)})], 5.0)
    at = swarm.committed(0)
    await swarm.until(lambda: swarm.committed(0) > at + 10, 20.0)
    await swarm.close()


# -- invites ------------------------------------------------------------------------------------------


@on_virtual_clock
async def test_a_run_by_invite_takes_in_whom_the_owner_invited_and_nobody_else():
    swarm = OwnedSwarm(tiny_manifest((2, 1), access="invite", contact="owner@example.org"), stub=True)
    swarm.open()

    def invite(name, days=1.0):
        peer = Identity.from_seed(name.encode()).peer_id if name else None
        seconds = swarm.loop.time()
        return seal_invite(OWNER, swarm.signed.run_id, peer, seconds + 86400 * days, seconds)

    for name, stage in FOUR[1:]:
        swarm.start(name, stage, invite=invite(name if name != "d" else ""))
    await swarm.training()
    for name, shown in (("x", b""), ("y", invite("b")), ("z", invite("z", -1.0))):
        uninvited = swarm.start(name, 1, invite=shown)
        with pytest.raises(UserError, match=rf"by invite only.*{uninvited.peer}.*owner@example\.org"):
            await swarm.end_of(uninvited)
        uninvited.dead = True
    # One that does not check itself is refused by everybody, and is sent nothing.
    rebel = swarm.start("r", 1)
    rebel.worker.orders.gatekeeper.check_self = lambda me: None
    await swarm.during(12.0)
    for name, _ in FOUR[1:]:
        known = swarm.members[name].worker.services.links.membership.peers.get(rebel.peer)
        assert known is None or not known.linked
    assert not any(note.fields.get("peer") == rebel.peer for note in swarm.of("linked", "b", "c", "d"))
    assert swarm.members["c"].worker.services.links.traffic.refused["not_invited"] > 0
    await swarm.crash("r")
    # Revoked: the bearer's links end.
    revoked = next(iter({
        swarm.members["c"].worker.orders.gatekeeper._admitted_invites[swarm.members["d"].peer][1].id
    }))  # fmt: skip
    await swarm.give(owner_orders.revoke(NO_ORDER, revoked, "lost"), "b")
    with pytest.raises(UserError, match="revoked"):
        await swarm.end_of(swarm.members["d"])
    swarm.members["d"].dead = True
    at = swarm.committed(1)
    await swarm.until(lambda: swarm.committed(1) > at + 10, 30.0)
    await swarm.close()


@on_virtual_clock
async def test_a_greeting_with_rubbish_for_an_invite_is_refused():
    swarm = OwnedSwarm(tiny_manifest((2, 1), access="invite"), stub=True)
    swarm.open()
    now = swarm.loop.time()
    mine = seal_invite(OWNER, swarm.signed.run_id, None, now + 1e6, now)
    swarm.start("a", 0, invite=mine)
    await swarm.during(3.0)
    stranger = Identity.from_seed(b"stranger")
    transport = swarm.network.transport(stranger.peer_id)
    transport.listen(Silent())
    gatekeeper = swarm.members["a"].worker.orders.gatekeeper
    own = seal_invite(stranger, swarm.signed.run_id, None, now + 1e6, now)
    copied = prove_invite(mine, swarm.signed.run_id, swarm.members["a"].peer)
    cut = prove_invite(mine, swarm.signed.run_id, stranger.peer_id)[:-1]
    for shown in (b"", b"x" * 200, own, mine, copied, cut):
        link = await transport.open(swarm.members["a"].peer, "group", 5.0)
        link.post(Hello(WIRE_VERSION, run_bytes(swarm.signed.run_id), b"", shown))
        await swarm.during(1.0)
        assert gatekeeper.refusal(stranger.peer_id, shown)[0] == "not_invited"
    refused = swarm.members["a"].worker.services.links.traffic.refused
    assert refused["not_invited"] == 6
    await swarm.close()


@on_virtual_clock
async def test_a_stranger_in_the_directory_gains_no_invite_from_a_newcomer_that_knows_nobody():
    swarm = OwnedSwarm(tiny_manifest((2, 1), access="invite"), stub=True)
    swarm.open()

    def invite(name):
        peer = Identity.from_seed(name.encode()).peer_id if name else None
        return seal_invite(OWNER, swarm.signed.run_id, peer, 1e9, 1.0)

    for name, stage in FOUR:
        swarm.start(name, stage, invite=invite(name))
    await swarm.training()
    strangers = [Liar(swarm, 0, f"stranger {number}") for number in range(3)]
    for stranger in strangers:
        directory = swarm.network.directory(stranger.identity.peer_id)
        await directory.announce(swarm.signed.run_id, 0, stranger.record, 5.0)
    newcomer = swarm.start("newcomer", 0, invite=invite(""))
    await swarm.until(lambda: swarm.of("in_step", "newcomer"), 30.0)
    heard = [message for stranger in strangers for message in stranger.messages]
    assert not [message.invite for message in heard if isinstance(message, Hello)]
    records = await directory.look_up(swarm.signed.run_id, 0, 5.0)
    shown = open_record(records[newcomer.peer], swarm.signed.run_id).record.invite
    keeper, thief = swarm.members["a"].worker.orders.gatekeeper, strangers[0].identity.peer_id
    assert keeper.refusal(newcomer.peer, shown) is None
    assert keeper.refusal(thief, shown)[0] == "not_invited"
    await swarm.close()
