"""Who passes on what its maker has not signed loses its link, and so does a stranger that sends bodies."""

import pytest
from clocks import on_virtual_clock
from hostile import Liar
from swarm import Swarm, tiny_manifest

from protocols.messages.table import Act, Chunk, Contribution, GetState, PeerRecord, PeerRecords, Statements
from protocols.signed.envelope import EnvelopeKind, seal
from protocols.signed.identity import Identity
from protocols.signed.records import seal_record

NOBODY = Identity.from_seed(b"nobody")


def bent(envelope):
    """Its signature does not fit any more."""
    return envelope[:60] + bytes([envelope[60] ^ 1]) + envelope[61:]


def record(swarm):
    said = PeerRecord(NOBODY.peer_id, 1, "worker", ["/memory/nobody"], 0, 0.0, "0")
    return seal_record(NOBODY, swarm.signed.run_id, said, swarm.loop.time())


def statement(swarm):
    return seal(NOBODY, swarm.signed.run_id, EnvelopeKind.SETTLED, 1, 3, 3, bytes(44))


def contribution(swarm):
    """What the victim holds itself, as its neighbour would pass it on."""
    update = swarm.members["victim"].worker.services.round_service
    return max(update.store.stored.values(), key=lambda stored: stored.reference.round).data


WORDS = {
    "record": lambda swarm, bend: (PeerRecords([bend(record(swarm))]), b""),
    "statement": lambda swarm, bend: (Statements([bend(statement(swarm))]), b""),
    "contribution": lambda swarm, bend: (Contribution(), bend(contribution(swarm))),
}


@pytest.mark.parametrize("word", WORDS)
@on_virtual_clock
async def test_a_forged_word_ends_the_link_of_who_passes_it_on_and_a_true_one_does_not(word):
    swarm = Swarm(tiny_manifest(stages=(1, 2)), stub=True)
    swarm.open()
    for name, stage in {"a": 0, "victim": 1, "c": 1}.items():
        swarm.start(name, stage, in_flight=1)
    await swarm.until(lambda: swarm.committed(0) >= 10, 60.0)
    liar, victim = Liar(swarm, 1), swarm.members["victim"]
    await liar.say(victim.peer, GetState())
    await swarm.during(0.5)
    link = liar._links[victim.peer, "group"]
    refused = victim.worker.services.links.traffic.refused
    assert (link.closed, refused["bad_signature"]) == (False, 0)
    await liar.say(victim.peer, *WORDS[word](swarm, lambda envelope: envelope))
    await swarm.during(0.1)
    assert (link.closed, refused["bad_signature"]) == (False, 0)
    await liar.say(victim.peer, *WORDS[word](swarm, bent))
    await swarm.during(0.1)
    assert (link.closed, refused["bad_signature"]) == (True, 1)
    await swarm.close()


@on_virtual_clock
async def test_who_forged_something_is_refused_for_twice_as_long_each_time_and_still_belongs_to_the_group():
    swarm = Swarm(tiny_manifest(stages=(1, 2)), stub=True)
    swarm.open()
    for name, stage in {"a": 0, "victim": 1, "c": 1}.items():
        swarm.start(name, stage, in_flight=1)
    await swarm.until(lambda: swarm.committed(0) >= 10, 60.0)
    liar, victim = Liar(swarm, 1), swarm.members["victim"]
    neighbourhood, me = victim.worker.services.links, liar.transport.peer
    for seconds in (10.0, 20.0):
        liar._links.clear()
        await liar.say(victim.peer, GetState())
        await swarm.during(0.5)
        assert me in neighbourhood.greeted
        assert neighbourhood.known()[me].linked
        await liar.say(victim.peer, *WORDS["record"](swarm, bent))
        at = swarm.loop.time()
        while swarm.loop.time() < at + seconds - 1.0:
            liar._links.clear()
            await liar.say(victim.peer, GetState())  # On a fresh link.
            await swarm.during(0.5)
            assert me not in neighbourhood.greeted
            assert not neighbourhood.known()[me].linked
            assert neighbourhood.membership.is_member(me), "its votes count as before"
        await swarm.during(1.5)
    assert "Refuse" in liar.heard
    await swarm.close()


@on_virtual_clock
async def test_a_worker_takes_no_body_of_a_stranger_and_none_that_the_run_does_not_have():
    swarm = Swarm(tiny_manifest(stages=(1, 2)), stub=True)
    swarm.open()
    swarm.start("a", 0, in_flight=1)
    victim = swarm.start("victim", 1, in_flight=1)
    await swarm.until(lambda: swarm.committed(0) >= 5, 60.0)
    stranger = Liar(swarm, 1)
    refused = victim.worker.services.links.traffic.refused
    assert refused["too_large"] == 0
    for count, message in enumerate((Act("x", 1, 1, 1, 1.0, (1, 1, 1)), Chunk(bytes(32), 0)), 1):
        link = await stranger.transport.open(victim.peer, "data", 5.0)
        link.post(message, bytes(1))
        await swarm.during(0.1)
        assert (link.closed, refused["too_large"]) == (True, count)
    longest = swarm.signed.manifest.body_bytes
    for length, closed in ((longest, False), (longest + 1, True)):
        await stranger.say(victim.peer, Act("x", 1, 1, 1, 1.0, (1, 1, 1)), bytes(length), "data")
        await swarm.during(0.1)
        assert stranger._links[victim.peer, "data"].closed is closed
    await swarm.close()
